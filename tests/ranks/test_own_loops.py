# SPDX-License-Identifier: Apache-2.0
"""Loops of the user's own on workers that have unequally many batches: who counts what, and when.

Workers are threads over real gloo, and read loaders of their own (``add_dist_sampler=False``).
"""

from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from harness import reset, rows
from lockstep import TrainingOperator
from lockstep.errors import (
    GradientNotReducedError,
    NotAvailableError,
    WeightError,
)
from lockstep.operator import Options
from lockstep.worker import LoopRequest, WorkerSpec
from ranks.table import run_workers
from ranks.table_operators import mlp, sgd

PER_BATCH = 2
BATCHES = [5, 3]
"""Of each rank: rank 1 repeats its third batch twice, with weight 0."""
FEATURES = [rows(PER_BATCH * count, 4, seed=30 + rank) for rank, count in enumerate(BATCHES)]
EVERYONE = torch.cat(FEATURES)


class OwnRows(TrainingOperator):
    def setup(self, config):
        model = reset(mlp(), 7)
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        loader = DataLoader(TensorDataset(FEATURES[self.world_rank]), PER_BATCH)
        self.register_data(train_loader=loader, validation_loader=loader)


def on_workers(operator_cls, purpose, num_steps=None, *, wrap_ddp=True, then=None):
    """The report of each worker's call; or what `then` makes of its operator behind the call."""
    options = Options(add_dist_sampler=False, wrap_ddp=wrap_ddp)
    spec = WorkerSpec(operator_cls, {}, 2, num_shards=2, seed=0, options=options)

    def body(worker):
        request = LoopRequest(purpose, num_steps, False, {})
        done = worker.train(request) if purpose == "train" else worker.validate(request)
        return done if then is None else then(worker.operator)

    return run_workers(spec, body)


class GathersAround(OwnRows):
    """Gathers in each step, and also before and behind the loop."""

    def train_epoch(self, iterator, info):
        own, in_steps = FEATURES[self.world_rank], []
        before = lockstep.gather(own)
        for (features,) in iterator:
            self.optimizer.zero_grad()
            output = lockstep.gather(self.model(features))
            in_steps.append(len(output))
            self.backward(output.square().mean())
            self.optimizer.step()
        return {
            "in_steps": in_steps,
            "around": [before, lockstep.gather(own)],
            "mean": lockstep.global_mean(own).item(),
            "places": lockstep.rank_slice(own),
        }


def test_outside_of_a_batch_every_rank_brings_its_rows():
    """Also where its last batch was borrowed, and before the first batch of the next pass."""
    reports = on_workers(GathersAround, "train", num_steps=2 * max(BATCHES))
    assert [len(report.passes) for report in reports] == [2, 2]
    for rank, report in enumerate(reports):
        for one in (done.metrics for done in report.passes):
            assert one["in_steps"] == [4, 4, 4, 2, 2]
            assert all(torch.equal(found, EVERYONE) for found in one["around"])
            assert one["mean"] == pytest.approx(EVERYONE.mean().item(), rel=1e-12)
            assert one["places"] == [slice(0, 10), slice(10, 16)][rank]


class OwnBatch(OwnRows):
    def train_batch(self, batch, batch_info):
        (features,) = batch
        self.optimizer.zero_grad()
        self.model(features).square().mean().backward()
        self.optimizer.step()
        return {}

    def validate_batch(self, batch, batch_info):
        (features,) = batch
        return {"val_loss": self.model(features).square().mean().item()}


@pytest.mark.parametrize("purpose", ["train", "validation"])
def test_between_calls_every_rank_counts_as_one(purpose):
    """Also where its last batch was borrowed."""

    def computes(operator):
        model, own = operator.model, FEATURES[operator.world_rank][:3]
        model.zero_grad()
        model(own).square().mean().backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        losses = [model(features[:3]).square().mean() for features in FEATURES]
        return found, torch.autograd.grad(sum(losses) / 2, list(model.parameters()))

    for found, true in on_workers(OwnBatch, purpose, then=computes):
        for one, other in zip(found, true, strict=True):
            assert (one - other).abs().max() < 1e-12


class ReadsAhead(OwnRows):
    def train_epoch(self, iterator, info):
        batches = iter(iterator)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            (features,) = batch
            self.optimizer.zero_grad()
            output = lockstep.gather(self.model(features))
            self.backward(output.square().mean(), weight=len(features))
            self.optimizer.step()
            batch = following
        return {}


def test_a_loop_that_reads_ahead_does_not_leave_rows_out():
    """The rows of the batch before a borrowed one would be dropped, if they were taken for its."""
    assert [report.steps for report in on_workers(ReadsAhead, "train", num_steps=3)] == [3, 3]
    with pytest.raises(WeightError, match=r"brings rows is not known[\s\S]*override train_batch"):
        on_workers(ReadsAhead, "train")


class Evaluates(OwnRows):
    """A `validate` that cannot tell a repeated batch."""

    def validate(self, val_iterator, info):
        seen = torch.cat([features for (features,) in val_iterator])
        return {"seen": seen, "everyone": lockstep.gather(seen)}


def test_a_validation_of_ones_own_sees_each_sample_once():
    for rank, report in enumerate(on_workers(Evaluates, "validation")):
        (done,) = report.passes
        assert torch.equal(done.metrics["seen"], FEATURES[rank])
        assert torch.equal(done.metrics["everyone"], EVERYONE)
        assert (report.samples, report.steps) == (len(FEATURES[rank]), max(BATCHES))


class EvaluatesBatches(OwnRows):
    def validate_batch(self, batch, batch_info):
        (features,) = batch
        return {"val_loss": features.mean(), "rows": len(lockstep.gather(features))}


def test_a_worker_that_has_run_out_takes_part_where_nothing_counts_its_batch_twice():
    reports = on_workers(EvaluatesBatches, "validation")
    (first,), (second,) = (report.passes for report in reports)
    assert (first.samples, second.samples) == (10, 6)
    assert (first.metrics["rows"], second.metrics["rows"]) == (pytest.approx(3.2), 4)
    for done, features in zip((first, second), FEATURES, strict=True):
        assert done.metrics["val_loss"] == pytest.approx(features.mean().item(), rel=1e-12)


LENGTHS = [[3, 1, 4], [5, 2, 6]]
"""Of each rank's sequences, in batches of two and one."""
SEQUENCES = [
    [(rows(length, 4, seed=50 + length), rows(1, 1, seed=60 + length)[0]) for length in lengths]
    for lengths in LENGTHS
]


def time_first(items):
    return pad_sequence([steps for steps, _ in items]), torch.stack([wanted for _, wanted in items])


class SumsTimeSteps(TrainingOperator):
    """Zeros behind a sequence change nothing, so that a batch may be as long as it likes."""

    trained: ClassVar = {}

    def setup(self, config):
        model = reset(nn.Linear(4, 1, bias=False), 7)
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        loader = DataLoader(SEQUENCES[self.world_rank], PER_BATCH, collate_fn=time_first)
        self.register_data(train_loader=loader)

    def compute_loss(self, batch, batch_info):
        steps, wanted = batch
        return F.mse_loss(self.model(steps).sum(0), wanted)

    def after_step(self):
        self.trained[self.world_rank] = self.model.weight.detach().clone()


class SumsTimeStepsInALoop(SumsTimeSteps):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.optimizer.zero_grad()
            self.backward(self.compute_loss(batch, {}))
            self.optimizer.step()
        self.after_step()
        return {}


@pytest.mark.parametrize("operator_cls", [SumsTimeSteps, SumsTimeStepsInALoop])
def test_batches_with_time_steps_first_count_for_their_samples(operator_cls):
    operator_cls.trained.clear()
    reports = on_workers(operator_cls, "train")
    assert [(report.samples, report.steps) for report in reports] == [(3, 2)] * 2
    model = reset(nn.Linear(4, 1, bias=False), 7)
    optimizer = sgd(model)
    for taken in (slice(0, 2), slice(2, 3)):
        steps, wanted = time_first([item for items in SEQUENCES for item in items[taken]])
        optimizer.zero_grad()
        F.mse_loss(model(steps).sum(0), wanted).backward()
        optimizer.step()
    for weight in operator_cls.trained.values():
        assert (weight - model.weight).abs().max() < 1e-12
    assert set(operator_cls.trained) == {0, 1}


class DefaultStep(OwnRows):
    """Without a synchronisation: a wrapper of the user's own would average the workers alike."""

    def compute_loss(self, batch, batch_info):
        return self.model(*batch).square().mean()


class OwnStep(DefaultStep):
    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        self.compute_loss(batch, batch_info).backward()
        self.optimizer.step()
        return {}


@pytest.mark.parametrize("operator_cls", [DefaultStep, OwnStep])
def test_a_worker_without_samples_does_not_count_in_a_wrapper_of_ones_own(operator_cls):
    """It would as if its repeated batch were new; nobody applies its weight of zero."""
    before = on_workers(operator_cls, "train", num_steps=min(BATCHES), wrap_ddp=False)
    assert [report.steps for report in before] == [3, 3]
    with pytest.raises(NotAvailableError, match=r"weight of zero[\s\S]*rank 1[\s\S]*drop_last"):
        on_workers(operator_cls, "train", wrap_ddp=False)


class NormalisedFirst(OwnRows):
    """In the default loop; worker 0 has the shorter loader, and its buffers are committed."""

    trained: ClassVar = {}

    def setup(self, config):
        model = nn.Sequential(nn.BatchNorm1d(4), reset(mlp(), 7)).double()
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        loader = DataLoader(TensorDataset(FEATURES[1 - self.world_rank]), PER_BATCH)
        self.register_data(train_loader=loader)

    def compute_loss(self, batch, batch_info):
        return self.model(*batch).square().mean()

    def after_step(self):
        self.trained[self.world_rank] = self.model[0].running_mean.clone()


def test_statistics_stay_where_worker_0_has_run_out_of_data():
    """Its repeated batch counts nothing, and its steps before were weighed by their samples."""
    on_workers(NormalisedFirst, "train")
    norm = nn.BatchNorm1d(4).double()
    for part in FEATURES[1].split(PER_BATCH):
        norm(part)
    for found in NormalisedFirst.trained.values():
        assert (found - norm.running_mean).abs().max() <= 1e-12
    assert set(NormalisedFirst.trained) == {0, 1}


ROWS_OF_NINE = 2 * 8 + 1
"""Of each rank: eight batches of two rows, and one of one."""
NINE = [rows(ROWS_OF_NINE, 4, seed=40 + rank) for rank in range(2)]
PER_WINDOW = 4


class PlainWindows(OwnRows):
    """Windows with plain backwards, under `no_sync` but for the last one."""

    def setup(self, config):
        super().setup(config)
        loader = DataLoader(TensorDataset(NINE[self.world_rank]), PER_BATCH)
        self.register_data(train_loader=loader)

    def train_epoch(self, iterator, info):
        self.optimizer.zero_grad()
        for number, (features,) in enumerate(iterator, 1):
            is_last = number % PER_WINDOW == 0 or number == 9
            with nullcontext() if is_last else self.no_sync():
                self.model(features).square().mean().backward()
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {"weights": [weight.detach().clone() for weight in self.model.parameters()]}


def test_a_smaller_last_batch_that_is_a_window_of_its_own_weighs_what_it_holds():
    """Also where the windows before it were of plain backwards, which no reduction followed."""
    model = reset(mlp(), 7)
    optimizer = sgd(model)
    cut = [features.split(PER_BATCH) for features in NINE]
    for window in (range(4), range(4, 8), range(8, 9)):
        optimizer.zero_grad()
        losses = [model(torch.cat(batches)).square().mean() for batches in zip(*cut, strict=True)]
        sum(losses[number] for number in window).backward()
        optimizer.step()
    for report in on_workers(PlainWindows, "train"):
        (done,) = report.passes
        for found, expected in zip(done.metrics["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)


class ReadsAheadOfPlainWindows(PlainWindows):
    def train_epoch(self, iterator, info):
        batches = iter(iterator)
        following = next(batches)
        for number in range(1, 10):
            (features,), following = following, next(batches, None)
            with nullcontext() if number % PER_WINDOW == 0 or number == 9 else self.no_sync():
                self.model(features).square().mean().backward()
        return {}


def test_a_loop_that_reads_one_batch_ahead_is_still_refused():
    """The eighth batch is trained on when the smaller one has been read."""
    with pytest.raises(WeightError, match=r"batches of \[2, 1\] samples, read and not yet trained"):
        on_workers(ReadsAheadOfPlainWindows, "train")


class StepsOneOfMany(TrainingOperator):
    """In batch 1 each worker steps other ones of eight optimizers."""

    chosen: ClassVar = ((0,), (1,))

    def setup(self, config):
        models = [reset(mlp(), seed) for seed in range(8)]
        self.all, self.optimizers = self.register(
            models=models, optimizers=[sgd(model) for model in models]
        )
        loader = DataLoader(TensorDataset(FEATURES[self.world_rank]), PER_BATCH)
        self.register_data(train_loader=loader)

    def train_batch(self, batch, info):
        (features,) = batch
        loss = sum(model(features).square().mean() for model in self.all)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(loss)
        for number in self.chosen[self.world_rank] if info["batch_idx"] == 1 else (0,):
            self.optimizers[number].step()
        return {}


@pytest.mark.sampled
@pytest.mark.parametrize("here", [(1,), (0, 2), (7,), ()])
@pytest.mark.parametrize("other", range(8))
def test_workers_that_step_different_optimizers_are_refused_before_the_next_step(here, other):
    operator_cls = type("StepsOthers", (StepsOneOfMany,), {"chosen": (here, (other,))})
    if here == (other,):
        on_workers(operator_cls, "train", 3)
        return
    with pytest.raises(GradientNotReducedError, match="stepped another optimizer"):
        on_workers(operator_cls, "train", 3)
