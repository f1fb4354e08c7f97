# SPDX-License-Identifier: Apache-2.0
"""What a module logs and counts: in the hooks of a step, and in a validation that fails."""

import pytest
import torch
import torchmetrics
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    Classifier,
    loader,
    problem,
)
from tests.unit.integrations.lightning.two_threads import on_two_threads
from torch.utils.data import DataLoader, Subset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.worker import LoopRequest

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*does not have many workers"
)


class LogsInHooks(Classifier):
    """Logs the number of its step in each hook of one."""

    def on_before_optimizer_step(self, optimizer):
        self.log("in_step", float(self.trainer.global_step), on_step=False, on_epoch=True)

    def on_before_zero_grad(self, optimizer):
        self.log("in_zero_grad", float(self.trainer.global_step), on_step=False, on_epoch=True)

    def on_after_backward(self):
        self.log("in_backward", float(self.trainer.global_step), on_step=False, on_epoch=True)


def test_what_hooks_of_a_step_log_counts_for_the_samples_of_that_step():
    operator = TrainingOperator.from_lightning(LogsInHooks, loader(GLOBAL_BATCH // 2), loader())
    with TorchTrainer(training_operator_cls=operator, num_shards=2) as trainer:
        metrics = trainer.train()
    sizes = [min(GLOBAL_BATCH, SAMPLES - GLOBAL_BATCH * step) for step in range(STEPS)]
    mean = sum(step * size for step, size in enumerate(sizes)) / SAMPLES
    assert metrics["in_step"] == pytest.approx(mean)
    assert metrics["in_zero_grad"] == pytest.approx(mean)
    assert metrics["in_backward"] == pytest.approx(mean)


class LogsByEveryReduction(Classifier):
    """Logs the number of each step, of all epochs together."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        step = float(self.trainer.global_step)
        for how in ("sum", "min", "max", "mean"):
            self.log(how, step, on_step=False, on_epoch=True, reduce_fx=how)
        self.log("both", step, on_step=True, on_epoch=True)
        self.mean.update(step)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_call_over_several_epochs_logs_as_one():
    """Of two epochs and a step of a third; metric objects hold the epoch alone."""
    operator = TrainingOperator.from_lightning(lambda config: LogsByEveryReduction(), loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train(num_steps=1)
        result = trainer.train(num_steps=2 * STEPS)
        again = trainer.train(num_steps=2)
    steps = range(1, 2 * STEPS + 1)
    sizes = [min(GLOBAL_BATCH, SAMPLES - GLOBAL_BATCH * (step % STEPS)) for step in steps]
    mean = sum(step * size for step, size in zip(steps, sizes, strict=True)) / sum(sizes)
    assert (result["sum"], result["min"], result["max"]) == (sum(steps), 1, 2 * STEPS)
    assert result["mean"] == result["both_epoch"] == pytest.approx(mean)
    assert result["last_sum"] == result["last_max"] == result["both_step"] == 2 * STEPS
    assert result["metric"] == 2 * STEPS
    assert (again["sum"], again["min"]) == (4 * STEPS + 3, 2 * STEPS + 1)


class CountsItsRows(Classifier):
    """Fails once in its validation, with metrics that nobody logs as such."""

    def __init__(self, fails_in):
        super().__init__()
        self.fails_in = fails_in
        self.rows, self.sum = torchmetrics.CatMetric(), torchmetrics.SumMetric()

    def fail(self, place):
        if self.fails_in == place:
            self.fails_in = None
            raise LookupError(place)

    def validation_step(self, batch, batch_idx):
        features, _ = batch
        self.rows.update(features[:, 0])
        self.sum.update(features[:, 0])
        if batch_idx == 3:
            self.fail("step")

    def on_validation_epoch_end(self):
        self.log("rows", self.rows.compute().numel())
        self.log("sum", self.sum.compute())
        self.rows.reset()
        self.sum.reset()
        self.fail("end")


@pytest.mark.parametrize("fails_in", ["step", "end"])
def test_a_validation_that_fails_leaves_the_metrics_as_it_found_them(fails_in):
    operator = TrainingOperator.from_lightning(
        lambda config: CountsItsRows(fails_in), loader(), loader()
    )
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train()
        trainer.validate(num_steps=2)
        with pytest.raises(LookupError):
            trainer.validate()
        result = trainer.validate()
    assert result["rows"] == SAMPLES
    assert result["sum"] == pytest.approx(problem().tensors[0][:, 0].sum().item())


class LogsAMetricForStepsAndEpochs(Classifier):
    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.mean.update(float(batch_idx))
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_of_steps_and_epochs_has_the_name_of_the_epochs_too():
    operator = TrainingOperator.from_lightning(LogsAMetricForStepsAndEpochs, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        metrics = trainer.train()
    assert metrics["mean_epoch"] == metrics["mean"] == pytest.approx((STEPS - 1) / 2)


class Detections(torchmetrics.Metric):
    """Keeps of each image a tensor and a mask as detection does: its size, and bytes."""

    def __init__(self):
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("masks", [], dist_reduce_fx=None)
        self.add_state("joined", [], dist_reduce_fx="cat")
        self.add_state("largest", torch.tensor(-1e3, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("seven", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, features):
        for row in features:
            self.boxes.append(row)
            self.masks.append(((2, 3), row.numpy().tobytes()))
        self.joined.append(features)
        self.largest = torch.maximum(self.largest, features.max())
        self.seven = torch.full_like(self.seven, 7.0)

    def compute(self):
        rows = torch.cat(self.joined) if isinstance(self.joined, list) else self.joined
        masks = [torch.frombuffer(bytearray(text), dtype=torch.float64) for _, text in self.masks]
        assert {size for size, _ in self.masks} == {(2, 3)}
        assert torch.stack(masks).equal(torch.stack(self.boxes))
        return rows.sum() + torch.stack(self.boxes).square().sum() + self.largest + self.seven


class Detects(Classifier):
    def __init__(self):
        super().__init__()
        self.detections = Detections()

    def validation_step(self, batch, batch_idx):
        self.detections.update(batch[0])
        self.log("detections", self.detections)


@pytest.mark.parametrize("count", [GLOBAL_BATCH + 5, GLOBAL_BATCH + 1, 1])
def test_a_metric_of_lists_that_are_no_tensors_and_of_unequal_length(count):
    """In the last batch the two workers have 3 and 2 samples; or one, and none."""

    def body(worker):
        report = worker.validate(LoopRequest("validation", None, False, {}))
        return report.passes[0].metrics["detections"]

    rows = DataLoader(Subset(problem(), range(count)), GLOBAL_BATCH // 2)
    made = TrainingOperator.from_lightning(Detects, loader(), rows)
    features = problem().tensors[0][:count]
    expected = (features.sum() + features.square().sum() + features.max() + 7.0).item()
    assert on_two_threads(made, body) == [pytest.approx(expected)] * 2
