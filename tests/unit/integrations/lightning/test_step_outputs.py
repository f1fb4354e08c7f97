# SPDX-License-Identifier: Apache-2.0
"""The outputs of a module's steps and its state beside the weights are used, or refused by name."""

import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    Classifier,
    by_lightning,
    farthest,
    loader,
    problem,
)
from tests.unit.integrations.lightning.test_unsupported import Rows
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import NonFiniteError, NotAvailableError
from lockstep.keys import BATCH_SIZE, WEIGHT

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


class Returns(Classifier):
    """As in RaySGD's own tutorial: nothing is logged."""

    def training_step(self, batch, batch_idx):
        features, target = batch
        loss = nn.functional.cross_entropy(self(features), target)
        return {"loss": loss, "first": features[:, 0].mean(), "rows": float(len(target))}

    def validation_step(self, batch, batch_idx):
        features, target = batch
        output = self(features)
        hits = (output.argmax(dim=1) == target).double().mean()
        return {"val_loss": nn.functional.cross_entropy(output, target), "val_accuracy": hits}


def trainer(module, train=None, validation=None, **arguments):
    operator = TrainingOperator.from_lightning(
        module, loader() if train is None else train, loader() if validation is None else validation
    )
    return TorchTrainer(training_operator_cls=operator, **arguments)


class Diverges(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


def test_a_loss_that_is_not_finite_is_named():
    with trainer(Diverges) as one, pytest.raises(NonFiniteError) as caught:
        one.train()
    assert "(dataset[0, 1, 2" in str(caught.value)
    assert "the loss is nan" in str(caught.value)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_numbers_in_a_dict_are_means_over_all_samples(num_shards):
    each = loader(GLOBAL_BATCH // num_shards)
    with trainer(Returns, each, loader(3), num_shards=num_shards) as one:
        trained = one.train()
        validated = one.validate()
        model = one.get_model()
    features, targets = problem().tensors
    output = model(features)
    assert trained["first"] == pytest.approx(features[:, 0].mean().item())
    assert trained.keys() >= {"train_loss", "last_train_loss", "rows", "last_rows"}
    hits = (output.argmax(dim=1) == targets).double().mean().item()
    assert validated["val_accuracy"] == pytest.approx(hits)
    loss = nn.functional.cross_entropy(output, targets).item()
    assert validated["val_loss"] == pytest.approx(loss, rel=1e-12)
    assert validated["num_samples"] == SAMPLES


class LossOnly(Returns):
    def validation_step(self, batch, batch_idx):
        returned = super().validation_step(batch, batch_idx)
        return {"loss": returned["val_loss"], "val_accuracy": returned["val_accuracy"]}


def test_a_loss_without_a_name_of_its_own_is_the_val_loss():
    with trainer(Returns) as one, trainer(LossOnly) as other:
        assert one.validate() == other.validate()


class ReturnsRows(Returns):
    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "targets": batch[1]}

    def validation_step(self, batch, batch_idx):
        return {**super().validation_step(batch, batch_idx), "log": {"val": 1.0}}


class ReadsRows(ReturnsRows):
    read = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["targets"].equal(batch[1])
        self.read += 1

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        assert outputs["log"] == {"val": 1.0}
        self.read += 1


class ReturnsPredictions(Classifier):
    def validation_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=1)


@pytest.mark.parametrize("num_shards", [1, GLOBAL_BATCH])
def test_what_is_no_number_is_left_to_hooks(num_shards):
    """Also where a shard has one sample."""
    each = loader(GLOBAL_BATCH // num_shards)
    for module, read in ((ReturnsRows, 0), (ReadsRows, SAMPLES if num_shards > 1 else STEPS)):
        with trainer(module, each, each, num_shards=num_shards) as one:
            trained, validated = one.train(), one.validate()
            assert trained.keys() & {"targets", "log"} == set()
            assert "first" in trained
            assert validated.keys() & {"targets", "log"} == set()
            assert getattr(one.get_model(), "read", 0) == 2 * read
    with trainer(ReturnsPredictions, each, each, num_shards=num_shards) as one:
        assert "val_loss" not in one.validate()


class Predicts(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=1)


def test_predict_step_is_what_predict_collects():
    with trainer(Predicts) as one:
        found = torch.stack(one.predict(loader()))
        assert found.equal(one.get_model()(problem().tensors[0] * 2).argmax(dim=1))


class AugmentsInTraining(Classifier):
    """As Lightning's documentation of the hook does, and notes what it was told."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        told = vars(self).setdefault("told", [])
        told.append((self.trainer.training, self.trainer.predicting))
        return (batch[0] * 2 if self.trainer.training else batch[0]), batch[1]


def test_a_prediction_is_not_augmented():
    with trainer(AugmentsInTraining) as one:
        one.train(num_steps=2)
        found = torch.stack(one.predict(loader()))
        expected = one.get_model()(problem().tensors[0]).detach()
        one.train(num_steps=1)
        told = one.get_local_operator().module.told
    assert (found - expected).abs().max() < 1e-12
    assert told == [(True, False)] * 2 + [(False, True)] * STEPS + [(True, False)]


def test_hooks_of_lightnings_own_prediction_are_refused_when_it_predicts():
    class Hooked(Classifier):
        def on_predict_start(self):
            pass

    with trainer(Hooked) as one:
        one.train()
        with pytest.raises(NotAvailableError, match="on_predict_start"):
            one.predict(loader())


class Counts(Rows):
    asked = 0
    seen = ()

    def state_dict(self):
        self.asked += 1
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rows"] = SAMPLES

    def on_load_checkpoint(self, checkpoint):
        self.seen = (checkpoint["rows"], checkpoint["hyper_parameters"]["width"])


@pytest.mark.parametrize("datamodule", [Rows, Counts])
def test_what_a_datamodule_keeps_comes_back(datamodule, tmp_path):
    operator = TrainingOperator.from_lightning(Classifier, datamodule=datamodule)
    arguments = {"training_operator_cls": operator, "config": {BATCH_SIZE: GLOBAL_BATCH}}
    with TorchTrainer(**arguments) as one:
        one.train()
        path = one.save(tmp_path / "state")
    with TorchTrainer(**arguments) as one:
        one.load(path)
        restored = one.get_local_operator().datamodule
        if datamodule is Counts:
            assert (restored.asked, restored.seen) == (1, (SAMPLES, 7))


def test_the_operator_gives_its_module():
    with trainer(Classifier) as one:
        inside = one.get_local_operator()
        assert inside.get_model() is inside.module


class MeansOverTokens(Classifier):
    """A third of the targets are ignored; the loss is a mean over the others."""

    weighs = True

    def training_step(self, batch, batch_idx):
        features, target = batch
        target = torch.where(features[:, 2] > 0.4, -100, target)
        loss = nn.functional.cross_entropy(self(features), target, ignore_index=-100)
        return {"loss": loss, WEIGHT: int((target >= 0).sum())} if self.weighs else loss


class MeansOverTokensBySamples(MeansOverTokens):
    weighs = False


@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_mean_over_tokens_is_weighed_by_what_the_dict_says(num_shards):
    expected, _ = by_lightning(MeansOverTokensBySamples(), max_epochs=2, validates=False)
    distances = []
    for module in (MeansOverTokens, MeansOverTokensBySamples):
        with trainer(module, loader(GLOBAL_BATCH // num_shards), num_shards=num_shards) as one:
            one.train(), one.train()
            distances.append(farthest(one.get_model(), expected))
    assert distances[0] < 1e-12
    assert num_shards == 1 or distances[1] > 1e-3
