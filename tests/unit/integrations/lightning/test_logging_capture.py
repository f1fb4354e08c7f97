# SPDX-License-Identifier: Apache-2.0
"""What a module logs and counts: in the hooks of a step, and in a validation that fails."""

import pytest
import torchmetrics
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    Classifier,
    loader,
    problem,
)

from lockstep import TorchTrainer, TrainingOperator

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
