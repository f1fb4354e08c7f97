# SPDX-License-Identifier: Apache-2.0
"""What a module finds in its trainer."""

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


class MeasuresItsLoader(Classifier):
    def on_train_epoch_start(self):
        held = self.trainer.train_dataloader
        self.log("length", float(len(held)))
        self.log("batch_size", float(held.batch_size))
        self.log("validation", float(len(self.trainer.val_dataloaders)))


def test_a_loaders_length_is_in_global_batches():
    operator = TrainingOperator.from_lightning(
        MeasuresItsLoader, loader(GLOBAL_BATCH // 2), loader()
    )
    with TorchTrainer(training_operator_cls=operator, num_shards=2) as trainer:
        metrics = trainer.train()
    assert metrics["length"] == STEPS
    assert metrics["batch_size"] == GLOBAL_BATCH // 2
    assert metrics["validation"] == -(-SAMPLES // (2 * GLOBAL_BATCH))
