# SPDX-License-Identifier: Apache-2.0
"""The arguments from which a module is made, and the features that are refused by name."""

import subprocess
import sys

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.unit.integrations.lightning.modules import SAMPLES, Classifier, farthest, loader, problem
from torch import nn
from torch.utils.data import DataLoader

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, LockstepError, NotAvailableError, WrongTypeError
from lockstep.keys import BATCH_SIZE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Rows(lightning.LightningDataModule):
    def __init__(self, batch_size=1):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        assert (stage, self.prepared) == ("fit", True)
        self.rows = problem()

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=self.batch_size)

    def val_dataloader(self):
        return [DataLoader(self.rows, batch_size=self.batch_size)]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        features, target = batch
        return features * 0, target


def test_a_datamodule_and_the_config():
    operator = TrainingOperator.from_lightning(Classifier, datamodule=Rows)
    config = {"width": 3, "lr": 0.0, BATCH_SIZE: 21}
    with TorchTrainer(training_operator_cls=operator, num_shards=2, config=config) as trainer:
        assert trainer.train()["batch_count"] == 3  # 44 rows in global batches of 21
        assert trainer.validate()["num_samples"] == SAMPLES
        module = trainer.get_model()
        assert trainer.get_local_operator().datamodule.trainer.num_training_batches == 3
    assert module.hparams == {"width": 3, "lr": 0.0}
    assert module.layers[0].out_features == 3


def test_an_instance_holds_the_trained_weights():
    module, before = Classifier(), Classifier()
    operator = TrainingOperator.from_lightning(module, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train()
        assert trainer.verify().ok
        assert farthest(module, trainer.get_model()) == 0
    assert farthest(module, before) > 1e-3
    with pytest.raises(RuntimeError, match="not attached"):
        _ = module.trainer


def test_the_other_package():
    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 2).double()

        def training_step(self, batch):
            loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
            self.log("mine", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with TorchTrainer(training_operator_cls=TrainingOperator.from_ptl(Other, loader())) as trainer:
        result = trainer.train()
    assert result["mine"] == pytest.approx(result["train_loss"])


class Several(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in (0, 2)]


class NoOptimizer(Classifier):
    def configure_optimizers(self):
        return None


class PlateauWithoutMonitor(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class OwnBackward(Classifier):
    def backward(self, loss):
        loss.backward()


class OldHook(Classifier):
    def training_epoch_end(self, outputs):
        pass


class NoLoss(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class StopsItself(Classifier):
    def on_train_epoch_end(self):
        self.trainer.should_stop = True


class Gathers(Classifier):
    def training_step(self, batch, batch_idx):
        return self.all_gather(super().training_step(batch, batch_idx))


class LogsAVector(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("vector", batch[0][0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module_cls", "kind", "says"),
    [
        (Several, NotAvailableError, "2 optimizers"),
        (NoOptimizer, ConfigurationError, "no optimizer"),
        (PlateauWithoutMonitor, ConfigurationError, '"monitor"'),
        (OwnBackward, NotAvailableError, "hook backward"),
        (OldHook, NotAvailableError, "on_train_epoch_end"),
        (NoLoss, NotAvailableError, "returned no loss"),
        (StopsItself, NotAvailableError, "should_stop"),
        (Gathers, NotAvailableError, "lockstep.gather"),
        (LogsAVector, ConfigurationError, "shape (5,)"),
    ],
)
def test_a_module_that_is_refused(module_cls, kind, says):
    operator = TrainingOperator.from_lightning(module_cls, loader())
    with (
        pytest.raises(kind) as refusal,
        TorchTrainer(training_operator_cls=operator) as trainer,
    ):
        trainer.train()
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "trainer_arguments", "says"),
    [
        ({}, {"sync": "ddp"}, "sync='ddp'"),
        ({}, {"scheduler_step_freq": "epoch"}, "scheduler_step_freq"),
        ({"gradient_clip_val": 1.0}, {"clip_grad_norm": 1.0}, "two settings"),
        ({}, {"config": {"widht": 3}}, "'widht'"),
        ({"val_dataloader": [loader(), loader()]}, {}, "ConcatDataset"),
    ],
)
def test_settings_that_are_refused(arguments, trainer_arguments, says):
    operator = TrainingOperator.from_lightning(Classifier, loader(), **arguments)
    with pytest.raises(LockstepError) as refusal:
        TorchTrainer(training_operator_cls=operator, **trainer_arguments)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "trainer_arguments"),
    [
        ({}, {"sync": "ddp"}),
        ({}, {"scheduler_step_freq": "epoch"}),
        ({"gradient_clip_val": 1.0}, {"clip_grad_norm": 1.0}),
    ],
)
def test_settings_are_refused_before_any_worker_starts(arguments, trainer_arguments, monkeypatch):
    def starts(*_, **__):
        raise AssertionError("something was started")

    for name in ("start_ray_engine", "has_gpus_elsewhere"):
        monkeypatch.setattr(f"lockstep.trainer.launch.{name}", starts)
    operator = TrainingOperator.from_lightning(Classifier, loader(), **arguments)
    with pytest.raises(ConfigurationError):
        TorchTrainer(training_operator_cls=operator, num_workers=2, **trainer_arguments)


def test_arguments_that_are_refused_at_once():
    with pytest.raises(ConfigurationError, match="num_workers"):
        TrainingOperator.from_lightning(Classifier, devices=2)
    with pytest.raises(WrongTypeError, match="LightningModule"):
        TrainingOperator.from_lightning(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="lambda config"):
        TorchTrainer(
            training_operator_cls=TrainingOperator.from_lightning(NeedsAnEncoder, loader())
        )


class NeedsAnEncoder(Classifier):
    def __init__(self, encoder):
        super().__init__()


def test_a_plateau_that_nobody_validates_for():
    class Waits(BoringModel):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "x"}

    with TorchTrainer(training_operator_cls=TrainingOperator.from_lightning(Waits)) as trainer:
        trainer.train()
        trainer.validate()
        with pytest.raises(ConfigurationError, match="watches 'x'"):
            trainer.train()


@pytest.mark.slow
def test_without_lightning_the_message_is_what_to_install():
    """In a process where Python cannot find either package."""
    program = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
from lockstep import TrainingOperator
try:
    TrainingOperator.from_lightning(object)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 'pip install "lockstep-train[lightning]"' in done.stdout
