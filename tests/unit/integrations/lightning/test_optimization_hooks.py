# SPDX-License-Identifier: Apache-2.0
"""A module's hooks run when Lightning calls them; its logged means count every sample once."""

import copy

import lightning
import pytest
import torch
import torchmetrics
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    Classifier,
    by_lightning,
    loader,
)
from tests.unit.trainer.test_step_examination import examined, trained

from lockstep import TorchTrainer, TrainingOperator

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on loader workers and logging intervals, and its use of older torch.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

HOOKS = [
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


class Witness(Classifier):
    """Notes each hook, where the run is, and whether layers train."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        often = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return [optimizer], [{"scheduler": often, "interval": "step", "frequency": 3}]


def _noted(hook):
    original = getattr(Witness, hook)

    def noted(self, *args, **kwargs):
        events = vars(self).setdefault("events", [])
        index = [each for each in args if isinstance(each, int)]
        events.append((hook, self.current_epoch, self.global_step, index, self.training))
        return original(self, *args, **kwargs)

    return noted


for _hook in HOOKS:
    setattr(Witness, _hook, _noted(_hook))


def _from(hook, events):
    return events[next(i for i, event in enumerate(events) if event[0] == hook) :]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_hooks_are_called_in_lightnings_order(accumulate):
    expected, _ = by_lightning(
        Witness(), max_epochs=2, validates=False, accumulate_grad_batches=accumulate
    )
    operator = TrainingOperator.from_lightning(Witness, loader())
    with TorchTrainer(training_operator_cls=operator, accumulate=accumulate) as trainer:
        trainer.train()
        trainer.train()
        module = trainer.get_local_operator().module
    assert _from("on_train_start", module.events) == _from("on_train_start", expected.events)
    names = [event[0] for event in module.events]
    assert names[:4] == ["prepare_data", "setup", "configure_model", "configure_optimizers"]
    assert names[-3:] == ["on_train_end", "on_fit_end", "teardown"]


def test_validation_hooks_are_called_in_lightnings_order():
    expected = Witness()
    lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    ).validate(expected, loader(), verbose=False)
    operator = TrainingOperator.from_lightning(Witness, loader(), loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.validate()
        module = trainer.get_local_operator().module

    def validating(events):
        return [event for event in _from("on_validation_start", events) if event[0] != "teardown"]

    assert validating(module.events) == validating(expected.events)


class Speaker(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2, average="micro")
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        features, target = batch
        self.log("samples", len(target), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", features.max(), reduce_fx=torch.max)
        self.log_dict({"first": features[:, 0].mean(), "heavy": 1.0}, batch_size=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        features, target = batch
        self.accuracy(self(features), target)
        self.seen(features[:, 0])
        self.log("accuracy", self.accuracy)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.log("seen", float(len(self.seen.compute())))
        self.seen.reset()


def test_what_is_logged_counts_every_sample_once():
    features, targets = loader().dataset.tensors
    operator = TrainingOperator.from_lightning(Speaker, loader(GLOBAL_BATCH // 2), loader(3))
    with TorchTrainer(training_operator_cls=operator, num_shards=2) as trainer:
        trained, validated = trainer.train(), trainer.validate()
        model = trainer.get_model()
        again = trainer.validate()
        trained_more = trainer.train(num_steps=2)
    hits = (model(features).argmax(dim=1) == targets).double().mean().item()
    assert trained["samples"] == SAMPLES
    assert trained["largest"] == features.max()
    assert trained["heavy"] == 1
    assert validated["accuracy"] == pytest.approx(hits)
    assert validated["seen"] == again["seen"] == SAMPLES
    assert validated["num_samples"] == SAMPLES
    assert again["accuracy"] == validated["accuracy"]
    assert trained_more["samples"] == 2 * GLOBAL_BATCH


class KeepsACount(Classifier):
    count = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count += len(batch[1])

    def on_save_checkpoint(self, checkpoint):
        assert list(checkpoint["state_dict"]) == list(self.state_dict())
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["hyper_parameters"]["width"] == 7
        self.count = checkpoint["count"]


def test_what_a_module_adds_to_a_checkpoint_comes_back(tmp_path):
    operator = TrainingOperator.from_lightning(KeepsACount, loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train()
        path = trainer.save(tmp_path / "state")
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.load(path)
        trainer.train()
        assert trainer.get_local_operator().module.count == 2 * SAMPLES


@pytest.mark.parametrize("accumulate", [1, 4])
def test_after_step_of_a_subclass_follows_each_step(accumulate):
    class Follows(TrainingOperator.from_lightning(Witness, loader())):
        seen = ()

        def after_step(self):
            self.seen = (*self.seen, self.module.layers[0].weight.detach().clone())

    with TorchTrainer(training_operator_cls=Follows, accumulate=accumulate) as trainer:
        trainer.train()
        operator = trainer.get_local_operator()
        steps, last = trainer.status()["step"], operator.module.layers[0].weight
        assert len(operator.seen) == -(-steps // accumulate)
        assert torch.equal(operator.seen[-1], last)


class FollowsItself(Classifier):
    """A second network follows the first whenever gradients are about to be cleared."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer):
        for own, followed in zip(self.target.parameters(), self.layers.parameters(), strict=True):
            own.lerp_(followed, 0.5)

    def training_step(self, batch, batch_idx):
        distance = (self(batch[0]) - self.target(batch[0]) + 0.1).square().mean()
        return super().training_step(batch, batch_idx) + distance


class WatchesItsBatches(Classifier):
    """Its learning rate falls if no epoch logs less than the first one; each logs 1."""

    def training_step(self, batch, batch_idx):
        self.log("full", float(len(batch[1]) > 1), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "full"},
        }


@pytest.mark.parametrize(
    ("module", "epochs", "steps"),
    [(FollowsItself, 1, range(2, 6)), (WatchesItsBatches, 3, range(11, 15))],
)
def test_examining_samples_leaves_hooks_and_logs_to_the_step(tmp_path, module, epochs, steps):
    operator = TrainingOperator.from_lightning(module, loader())
    trained(tmp_path, operator, epochs=epochs, num_shards=1)
    examination = examined(tmp_path, operator, steps, steps[-1])  # asserts the same bits
    assert all(each.samples for each in examination.examined)


class ReadsItsValidation(Classifier):
    """Notes what it finds as an epoch begins, and as its training ends."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_epoch_start(self):
        self._note("start")

    def on_train_epoch_end(self):
        assert "train_loss" in self.trainer.callback_metrics
        self._note("end")

    def _note(self, when):
        value = self.trainer.callback_metrics.get("val_loss")
        self.found.append((when, None if value is None else value.item()))


def test_the_last_epochs_validation_is_not_taken_for_this_ones():
    """In Lightning the epoch's validation has come before the hook on its end; here it has not."""
    expected, _ = by_lightning(ReadsItsValidation(), max_epochs=2)
    operator = TrainingOperator.from_lightning(ReadsItsValidation, loader(), loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        for _ in range(2):
            trainer.train(), trainer.validate()
        module = trainer.get_local_operator().module
        known = module.trainer.callback_metrics["val_loss"].item()
    numbers = [value for _, value in expected.found]
    assert numbers[0] is None
    assert numbers[1] == numbers[2] != numbers[3]
    assert module.found == [
        ("start", None),
        ("end", None),
        ("start", pytest.approx(numbers[2], rel=1e-6)),
        ("end", None),
    ]
    assert known == pytest.approx(numbers[3], rel=1e-6)


class NeedsItsValidation(Classifier):
    def on_train_epoch_end(self):
        if self.current_epoch:
            self.trainer.callback_metrics["val_loss"]


def test_a_validation_that_has_not_come_yet_says_so():
    operator = TrainingOperator.from_lightning(NeedsItsValidation, loader(), loader())
    with TorchTrainer(training_operator_cls=operator) as trainer:
        trainer.train(), trainer.validate()
        with pytest.raises(KeyError, match=r"validate\(\) comes after trainer\.train"):
            trainer.train()
