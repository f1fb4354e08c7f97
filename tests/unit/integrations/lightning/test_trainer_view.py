# SPDX-License-Identifier: Apache-2.0
"""What a module finds in its trainer."""

import cloudpickle
import lightning
import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    Classifier,
    loader,
    problem,
)
from tests.unit.integrations.lightning.two_threads import on_two_threads
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import NotAvailableError
from lockstep.worker import LoopRequest

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


class KnowsItsEnd(Classifier):
    """Each rank reads a part of its own."""

    rows = (22, 22)

    def train_dataloader(self):
        ranks, rank = len(self.rows), self.trainer.global_rank
        part = Subset(problem(), range(ranks * self.rows[rank]))
        sampler = DistributedSampler(part, ranks, rank, shuffle=False)
        return DataLoader(part, GLOBAL_BATCH // ranks, sampler=sampler)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class HasUnequalParts(KnowsItsEnd):
    rows = (22, 17)


@pytest.mark.parametrize("module_cls", [KnowsItsEnd, HasUnequalParts])
def test_an_epoch_of_loaders_of_ones_own_is_as_long_as_the_longest(module_cls):
    """A schedule ends with the run: its last step alone has a rate of zero behind it."""

    def body(worker):
        view, optimizer = worker.operator.module.trainer, worker.operator.optimizer
        told = [len(view.train_dataloader), view.estimated_stepping_batches]
        worker.train(LoopRequest("train", None, False, {}))
        worker.train(LoopRequest("train", STEPS - 1, False, {}))
        before = optimizer.param_groups[0]["lr"]
        worker.train(LoopRequest("train", 1, False, {}))
        return [*told, before > 0, optimizer.param_groups[0]["lr"]]

    operator = TrainingOperator.from_lightning(module_cls, max_epochs=2)
    ends = on_two_threads(operator, body, add_dist_sampler=False)
    assert ends == [[STEPS, 2 * STEPS, True, 0.0]] * 2


class EndsAWholeEpochLater(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        epochs = self.trainer.max_epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)]


def test_a_length_that_nobody_said_is_missed_where_it_is_asked_for():
    told = TrainingOperator.from_lightning(EndsAWholeEpochLater, loader(), max_epochs=2)
    with TorchTrainer(training_operator_cls=told) as trainer:
        trainer.train()
    untold = TrainingOperator.from_lightning(EndsAWholeEpochLater, loader())
    with pytest.raises(NotAvailableError, match="max_epochs"):
        TorchTrainer(training_operator_cls=untold)


class AsksCarefully(Classifier):
    def configure_optimizers(self):
        self.told = getattr(self.trainer, "max_epochs", None)
        return super().configure_optimizers()


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_module_may_ask_whether_the_length_is_known(epochs):
    operator = TrainingOperator.from_lightning(AsksCarefully, loader(), max_epochs=epochs)
    with TorchTrainer(training_operator_cls=operator) as trainer:
        assert trainer.get_local_operator().module.told == epochs


class ClipsByANumber(Classifier):
    """A number that is not above zero means: not at all."""

    clip_val = 0.0

    def on_before_optimizer_step(self, optimizer):
        before = [parameter.grad.clone() for parameter in self.parameters()]
        self.clip_gradients(optimizer, self.clip_val)
        for old, parameter in zip(before, self.parameters(), strict=True):
            assert torch.equal(old, parameter.grad) == (self.clip_val <= 0)


@pytest.mark.parametrize("clip_val", [-1, 0, 1e-3])
def test_gradients_are_clipped_to_a_positive_number_alone(clip_val):
    module_cls = type("Clips", (ClipsByANumber,), {"clip_val": clip_val})
    operator = TrainingOperator.from_lightning(module_cls, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train(num_steps=1)


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return loader()


def test_a_data_module_forgets_the_trainer_that_has_ended():
    data = Data()
    operator = TrainingOperator.from_lightning(Classifier, datamodule=data)
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train(num_steps=1)
        second = TorchTrainer(training_operator_cls=operator)
    assert data.trainer is not None  # the second one's
    second.shutdown()
    assert data.trainer is None
    cloudpickle.dumps(operator)
