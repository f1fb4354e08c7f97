# SPDX-License-Identifier: Apache-2.0
"""What hooks of a step log counts for the samples of that step."""

import pytest
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    Classifier,
    loader,
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
