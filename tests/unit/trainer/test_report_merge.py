# SPDX-License-Identifier: Apache-2.0
"""The keys and the values that `train` and `validate` return."""

import math

import pytest
import torch
from tests.tokens import Tokens
from tests.unit.trainer.programs import SAMPLES, Regression, linear, problem, sgd, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.metrics import AverageMeterCollection
from lockstep.trainer.report_merge import merge_reports
from lockstep.worker import PassResult, Report
from lockstep.worker.report import LoopCounts, report_of_lost_worker

TRAIN_KEYS = {"num_samples", "epoch", "batch_count", "train_loss", "last_train_loss"}
VALIDATE_KEYS = {"num_samples", "batch_count", "val_loss", "last_val_loss"}
ACCURACY_KEYS = {"val_accuracy", "last_val_accuracy"}


def test_the_keys_of_a_regression():
    with trainer() as one:
        assert one.train().keys() == TRAIN_KEYS
        assert one.validate().keys() == VALIDATE_KEYS


def test_profile_adds_the_seconds_of_each_phase():
    with trainer() as one:
        train, validate = one.train(profile=True), one.validate(profile=True)
        assert train["profile"].keys() == {
            "mean_fwd_s", "mean_grad_s", "mean_apply_s", "mean_train_epoch_s",
        }  # fmt: skip
        assert validate["profile"].keys() == {"mean_eval_fwd_s", "mean_validation_s"}
        assert all(0 < seconds < 10 for seconds in train["profile"].values())
        assert one.train().keys() == TRAIN_KEYS


def test_own_timers_are_profiled():
    class Timed(Regression):
        def compute_loss(self, batch, batch_info):
            with self.timers.record("mine"):
                return super().compute_loss(batch, batch_info)

    with trainer(Timed) as one:
        assert one.train(profile=True)["profile"]["mean_mine_s"] > 0
        assert "profile" not in one.train()


def test_results_of_each_worker():
    with trainer() as one:
        whole = one.validate()
        assert one.validate(reduce_results=False) == [whole]
        (train,) = one.train(reduce_results=False)
        assert train.keys() == TRAIN_KEYS


def test_the_loss_is_the_mean_over_samples():
    features, target = problem()
    expected = nn.functional.mse_loss(linear()(features), target).item()
    with trainer() as one:
        result = one.validate()
    assert result["val_loss"] == pytest.approx(expected, rel=1e-12)
    assert (result["num_samples"], result["batch_count"]) == (SAMPLES, 4)


def test_nan_stays_nan():
    class Broken(Regression):
        def compute_loss(self, batch, batch_info):
            loss = super().compute_loss(batch, batch_info)
            return loss, {"odd": math.nan if batch_info["batch_idx"] == 1 else 1.0}

    with trainer(Broken) as one:
        result = one.train()
    assert math.isnan(result["odd"])
    assert result["last_odd"] == 1.0


def classes(output_width, target):
    class Classes(TrainingOperator):
        def setup(self, config):
            model = nn.Linear(3, output_width, dtype=torch.float64)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=sgd(model), criterion=self.loss
            )
            data = TensorDataset(problem()[0], target)
            self.register_data(
                train_loader=DataLoader(data, 6), validation_loader=DataLoader(data, 6)
            )

        @staticmethod
        def loss(output, target):
            return output.square().mean()

    return Classes


def test_accuracy_for_class_targets():
    target = torch.arange(SAMPLES) % 3
    with trainer(classes(3, target)) as one:
        result = one.validate()
        model = one.get_model()
    assert result.keys() == VALIDATE_KEYS | ACCURACY_KEYS
    hits = (model(problem()[0]).argmax(dim=1) == target).double()
    assert result["val_accuracy"] == pytest.approx(hits.mean().item(), abs=1e-12)
    assert result["last_val_accuracy"] == pytest.approx(hits[18:].mean().item(), abs=1e-12)


@pytest.mark.parametrize(
    ("width", "target"),
    [
        (1, torch.zeros(SAMPLES, 1, dtype=torch.float64)),
        (1, torch.zeros(SAMPLES, 1, dtype=torch.long)),
        (2, torch.zeros(SAMPLES, 2, dtype=torch.long)),
        (2, torch.zeros(SAMPLES)),
    ],
)
def test_no_accuracy_where_targets_are_no_classes(width, target):
    with trainer(classes(width, target)) as one:
        assert one.validate().keys() == VALIDATE_KEYS


def _report(passes, sums):
    return Report(passes, sums, samples=8, steps=2, epoch=1, timers=None)


def test_a_pass_that_was_interrupted_behind_its_last_batch_has_the_metrics_of_its_batches():
    """It comes to its end in another group, and has no batches there."""
    meters = AverageMeterCollection()
    for loss in (1.0, 3.0):
        meters.update({"train_loss": loss, "odd": "latest"}, n=4)
    nothing = AverageMeterCollection()
    ended = PassResult(nothing.summary(), nothing.state(), samples=8)
    report = _report([ended], meters.state())
    lost = report_of_lost_worker(4, LoopCounts(4, meters.state()))
    for merged in (merge_reports([report]), merge_reports([report, lost])):
        assert (merged["train_loss"], merged["last_train_loss"]) == (2.0, 3.0)
        assert merged["odd"] == "latest"


def test_what_a_loop_leaves_out_of_lockstep_s_metrics_stays_out():
    meters = AverageMeterCollection()
    meters.update({"train_loss": 1.0}, n=8)
    sums = meters.state()
    merged = merge_reports([_report([PassResult({"mine": 2.0}, sums, samples=8)], sums)])
    assert merged == {"num_samples": 8, "batch_count": 2, "mine": 2.0, "epoch": 1}


def test_a_metric_that_a_loop_changes_in_one_pass_is_a_mean_over_all_passes():
    class Clipped(Regression):
        def train_epoch(self, iterator, info):
            result = super().train_epoch(iterator, info)
            result["train_loss"] = min(result["train_loss"], limit)
            return result

    with trainer() as one:
        long, short = one.train()["train_loss"], one.train(num_steps=2)["train_loss"]
    assert long > short
    limit = (long + short) / 2
    with trainer(Clipped) as one:
        result = one.train(num_steps=6)
    expected = (limit * SAMPLES + short * 12) / (SAMPLES + 12)
    assert result["train_loss"] == pytest.approx(expected, rel=1e-12)


def test_what_a_loop_changes_of_a_mean_over_tokens_stays_one():
    class PerBit(Tokens):
        def train_epoch(self, iterator, info):
            result = super().train_epoch(iterator, info)
            for key in ("train_loss", "last_train_loss"):
                result[key] /= math.log(2)
            return result

    plain, scaled = (trainer(operator, config={BATCH_SIZE: 5}) for operator in (Tokens, PerBit))
    with plain:
        expected = plain.train(num_steps=6)
    with scaled:
        result = scaled.train(num_steps=6)
    for key in ("train_loss", "last_train_loss"):
        assert result[key] == pytest.approx(expected[key] / math.log(2), rel=1e-12)


def test_a_loop_that_returns_nothing_on_some_ranks_leaves_nothing_out():
    """As where rank 0 alone returns what it prints."""
    reports = []
    for loss in (1.0, 3.0):
        meters = AverageMeterCollection()
        meters.update({"val_loss": loss}, n=8)
        found = {} if reports else meters.summary()
        reports.append(_report([PassResult(found, meters.state(), samples=8)], meters.state()))
    assert merge_reports(reports)["val_loss"] == 2.0
    assert "val_loss" not in merge_reports(reports[1:])
