# SPDX-License-Identifier: Apache-2.0
"""`Mine.from_lightning(Module)` runs the methods of `Mine`, from which `super()` is Lightning's.

Of `lockstep.integrations.lightning.lightning_operator`.
"""

import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    Classifier,
    by_lightning,
    farthest,
    loader,
)
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

METHODS = [
    "after_step",
    "compute_loss",
    "load_state_dict",
    "predict_batch",
    "state_dict",
    "to_device",
    "train_batch",
    "train_epoch",
    "validate",
    "validate_batch",
]


class Mine(TrainingOperator):
    """Notes which of its methods are called."""

    called = ()


def _noting(method):
    def noting(self, *arguments):
        Mine.called = (*Mine.called, method)
        return getattr(super(Mine, self), method)(*arguments)

    return noting


for _method in METHODS:
    setattr(Mine, _method, _noting(_method))


def test_each_method_is_called_and_leads_to_lightnings(tmp_path):
    expected, reference = by_lightning(Classifier())
    made = Mine.from_lightning(Classifier, loader(), loader())
    with TorchTrainer(training_operator_cls=made) as trainer:
        for _ in range(3):
            trainer.train()
            validated = trainer.validate()
        path = trainer.save(tmp_path / "state")
        trainer.load(path)
        predicted = trainer.predict(loader())
        model = trainer.get_model()
    assert farthest(model, expected) < 1e-12
    logged = reference.callback_metrics["val_loss"].item()
    assert validated["val_loss"] == pytest.approx(logged, rel=1e-6)
    assert len(predicted) == len(loader().dataset)
    assert sorted(set(Mine.called)) == METHODS


class LosesTwice(TrainingOperator):
    """A loss without `super()`."""

    def compute_loss(self, batch, batch_info):
        features, target = batch
        return 2 * nn.functional.cross_entropy(self.module(features), target)


class Doubled(Classifier):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


def test_a_loss_of_its_own_begins_without_the_last_steps_gradients():
    expected, _ = by_lightning(Doubled(), max_epochs=1, validates=False)
    made = LosesTwice.from_lightning(Classifier, loader(GLOBAL_BATCH // 2))
    with TorchTrainer(training_operator_cls=made, num_shards=2) as trainer:
        trainer.train()
        assert farthest(trainer.get_model(), expected) < 1e-12


class SetsUp(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(5, 2)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_setup_of_its_own_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"SetsUp\.setup and the LightningModule"):
        SetsUp.from_lightning(Classifier, loader())


def test_an_operator_of_one_module_makes_that_of_another():
    class Sets(TrainingOperator.from_lightning(Doubled, loader())):
        def setup(self, config):
            super().setup(config)
            self.is_set_up = True

    expected, _ = by_lightning(Classifier(), max_epochs=1, validates=False)
    with TorchTrainer(training_operator_cls=Sets.from_lightning(Classifier, loader())) as trainer:
        trainer.train()
        assert trainer.get_local_operator().is_set_up
        assert farthest(trainer.get_model(), expected) < 1e-12
