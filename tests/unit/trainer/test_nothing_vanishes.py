# SPDX-License-Identifier: Apache-2.0
"""Whatever a user can return, set, pass or override is used, or refused by its name.

`lockstep.trainer.unused_definitions`, `lockstep.trainer.callbacks` and
`lockstep.trainer.torch_trainer`.
The tables are held to the classes: a new public name that no row knows fails a test.
"""

import contextlib
import inspect

import lightning
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from tests.unit.integrations.lightning.modules import Classifier
from tests.unit.integrations.lightning.modules import loader as rows
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn

from lockstep import Callback, TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, LockstepError, NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def live(one, tmp_path):
    """Everything that a trainer's life has."""
    one.train(info={"mine": 1})
    one.validate(info={"mine": 1})
    one.predict(loader())
    one.load(one.save(tmp_path / "state"))


def recording(base, name):
    """A subclass whose `name` notes that it was called, and goes on as before."""
    original = getattr(base, name)

    def noted(self, *arguments, **further):
        called.add(name)
        return original(self, *arguments, **further)

    called = set()
    return type(base.__name__, (base,), {name: noted, "__module__": __name__}), called


# --------------------------------------------------------------------- what one may override

CALLED = (
    "setup",
    "compute_loss",
    "train_epoch",
    "train_batch",
    "validate",
    "validate_batch",
    "predict_batch",
    "state_dict",
    "load_state_dict",
    "register",
    "register_data",
    "to_device",
    "after_step",
)

REFUSED = {
    "backward": r"backward would never be called",
    "no_sync": r"no_sync would never be called",
    "device": r"read self\.device",
    "device_ids": r"read self\.device_ids",
    "config": r"config=\.\.\.",
    "world_rank": r"read self\.world_rank",
    "local_rank": r"read self\.local_rank",
    "is_borrowed_batch": r"read self\.is_borrowed_batch",
    "use_gpu": r"TorchTrainer\(\.\.\., use_gpu=",
    "use_fp16": r"TorchTrainer\(\.\.\., use_fp16=",
    "use_tqdm": r"TorchTrainer\(\.\.\., use_tqdm=",
    "scheduler_step_freq": r"TorchTrainer\(\.\.\., scheduler_step_freq=",
}

ELSEWHERE = {
    "joint_loss": "tests/ray/test_joint_losses.py",
    "loss_reduction": "tests/unit/operator/test_loss_reduction.py",
    "register_metrics": "a user's setup calls it; tests/unit/operator/"
    "test_registered_torchmetrics.py",
    "from_creators": "called by users alone",
    "from_lightning": "called by users alone",
    "from_ptl": "called by users alone",
    "from_model": "called by users alone",
}


def test_the_tables_know_every_public_name_of_an_operator():
    public = {name for name in vars(TrainingOperator) if not name.startswith("_")}
    assert public == {*CALLED, *REFUSED, *ELSEWHERE}


def test_private_names_of_an_operator_are_free_for_its_class():
    private = {name for name in vars(TrainingOperator) if not name.endswith("__")}
    assert {name for name in private if name.startswith("_") and "_lockstep" not in name} == set()

    class Helped(Regression):
        def compute_loss(self, batch, batch_info):
            return self._check(super().compute_loss(batch, batch_info))

        def _check(self, loss):
            return loss * self._overrides

        def _end(self):
            raise AssertionError("nobody called for it")

        _overrides = 2.0

    with trainer(Helped) as one, trainer(Regression) as plain:
        loss = plain.train(num_steps=1)["train_loss"]
        assert one.train(num_steps=1)["train_loss"] == 2 * loss


class Stateful(Regression):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("name", CALLED)
def test_an_overridden_method_is_called(name, tmp_path):
    operator, called = recording(Stateful, name)
    with trainer(operator) as one:
        live(one, tmp_path)
    assert called == {name}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_class_cannot_say_is_refused(name):
    is_method = inspect.isfunction(getattr(TrainingOperator, name))
    value = (lambda self, *arguments: None) if is_method else "mine"
    with pytest.raises(ConfigurationError, match=REFUSED[name]):
        trainer(type("Mine", (Regression,), {name: value, "__module__": __name__}))


def test_a_state_that_nobody_saves_is_not_waited_for():
    class Waits(Regression):
        def load_state_dict(self, state):
            raise AssertionError

    with pytest.raises(ConfigurationError, match=r"load_state_dict would[^$]*def state_dict"):
        trainer(Waits)


def test_a_step_of_ones_own_may_call_what_one_overrides():
    recorded, called = recording(Regression, "backward")

    class OwnStep(recorded):
        def train_batch(self, batch, batch_info):
            self.optimizer.zero_grad()
            self.backward(self.compute_loss(batch, batch_info))
            self.optimizer.step()
            return {}

    with trainer(OwnStep) as one:
        one.train()
    assert called == {"backward"}


HOOKS = {name for name in vars(Callback) if name.startswith("on_")}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_of_a_callback_is_called(name, tmp_path):
    callback, called = recording(Callback, name)
    callback.every = 1
    with contextlib.suppress(LookupError), trainer(callbacks=[callback()]) as one:
        live(one, tmp_path)
        if name == "on_failure":
            raise LookupError
    assert called == {name}


# ----------------------------------------------------------------------- what one may return


def returning(method, value):
    return type("Mine", (Regression,), {method: lambda self, *_: value, "__module__": __name__})


@pytest.mark.parametrize("value", [None, 3.0, torch.ones(()), [1]])
@pytest.mark.parametrize("method", ["train_batch", "train_epoch", "validate_batch", "validate"])
def test_what_is_no_dict_of_metrics_is_refused(method, value):
    with trainer(returning(method, value)) as one, pytest.raises(LockstepError) as refusal:
        one.train() if method.startswith("train") else one.validate()
    assert f"{method} " in str(refusal.value)


@pytest.mark.parametrize("method", ["train_batch", "train_epoch", "validate_batch", "validate"])
def test_every_entry_of_a_dict_of_metrics_is_in_the_result(method):
    entries = {"number": 2.5, "tensor": torch.tensor(3.0), "word": "said", "last_one": 1}

    def own(self, *arguments):
        return {**getattr(super(Mine, self), method)(*arguments), **entries}

    Mine = type("Mine", (Regression,), {method: own, "__module__": __name__})
    with trainer(Mine) as one:
        result = one.train() if method.startswith("train") else one.validate()
    assert {name: result[name] for name in entries} == entries


@pytest.mark.parametrize("value", [None, {"loss": 1}, 3.0, torch.ones(2), [torch.ones(()), {}]])
def test_what_is_no_loss_is_refused(value):
    said = pytest.raises(ConfigurationError, match="compute_loss returned something else")
    with trainer(returning("compute_loss", value)) as one, said:
        one.train()


def test_a_number_of_samples_beside_a_loss_is_refused():
    class Counts(Regression):
        def compute_loss(self, batch, batch_info):
            return super().compute_loss(batch, batch_info), {"num_samples": 1}

    with trainer(Counts) as one, pytest.raises(ConfigurationError, match=r"keys\.WEIGHT"):
        one.train()
    with trainer(Counts) as one, pytest.raises(ConfigurationError, match=r"keys\.WEIGHT"):
        one.validate()


def test_what_setup_returns_is_refused():
    class Returns(Regression):
        def setup(self, config):
            super().setup(config)
            return self.model

    with pytest.raises(LockstepError, match=r"setup returned something[^$]*register\(models="):
        trainer(Returns)


@pytest.mark.parametrize("name", sorted(HOOKS - {"on_failure"}))
def test_what_a_callback_returns_is_refused(name):
    held = {name: lambda *_: False, "every": 1, "__module__": __name__}
    callback = type("Mine", (Callback,), held)()
    said = pytest.raises(LockstepError, match=rf"Mine\.{name} returned [^$]*stop_reason")
    with said, trainer(callbacks=[callback]) as one:
        one.train()
        one.validate()


def test_an_on_step_that_would_never_be_called_is_refused():
    class Forgets(Callback):
        def on_step(self, trainer, step, metrics):
            pass

    class IsOff(Forgets):
        every = None

    with pytest.raises(ConfigurationError, match=r"Forgets\.every cannot be None[^$]*every = 1"):
        trainer(callbacks=[Forgets()])
    with trainer(callbacks=[IsOff()]) as one:
        one.train()


# ------------------------------------------------------------------- what one may set and pass


class ReadsInfo(Regression):
    def train_batch(self, batch, batch_info):
        return {**super().train_batch(batch, batch_info), "seen": batch_info["mine"]}

    def validate_batch(self, batch, batch_info):
        return {**super().validate_batch(batch, batch_info), "seen": batch_info["mine"]}


def test_info_arrives():
    with trainer(ReadsInfo) as one:
        assert one.train(info={"mine": 7})["seen"] == one.validate(info={"mine": 7})["seen"] == 7


def test_loaders_that_were_set_and_not_registered_are_asked_for():
    class Sets(TrainingOperator):
        def setup(self, config):
            self.model, self.optimizer, self.criterion = self.register(
                models=(model := linear()), optimizers=sgd(model), criterion=nn.MSELoss()
            )
            self.train_loader = self.validation_loader = loader()

    with trainer(Sets) as one:
        with pytest.raises(ConfigurationError, match=r"register_data\(train_loader="):
            one.train()
        with pytest.raises(ConfigurationError, match=r"register_data\(validation_loader="):
            one.validate()


def test_a_model_that_was_set_and_not_registered_is_asked_for():
    class Sets(TrainingOperator):
        def setup(self, config):
            self.model = linear()

    with pytest.raises(ConfigurationError, match=r"register\(models="):
        trainer(Sets)


@pytest.mark.parametrize(
    "call",
    [
        lambda: trainer(num_worker=2),
        lambda: TrainingOperator.from_lightning(Classifier, rows(), devices=2),
        lambda: trainer(returning("setup", None)),
    ],
)
def test_an_argument_of_nobody_is_refused_by_name(call):
    with pytest.raises((TypeError, ValueError), match=r"num_worker|devices|register"):
        call()


# ----------------------------------------------------------------------- the Lightning door

OTHER_LOOPS = {
    *(name for name in vars(ModelHooks) if name.startswith("on_test_")),
    "test_step",
    "test_dataloader",
    "predict_dataloader",
}
"""Of loops that a lockstep trainer has not: `trainer.predict` is handed its loader."""

STEPS = {
    "forward",
    "training_step",
    "validation_step",
    "predict_step",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
}

LIGHTNING = sorted(
    {
        name
        for hooks in (ModelHooks, DataHooks, CheckpointHooks)
        for name in vars(hooks)
        if not name.startswith("_")
    }
    | STEPS
)


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self):
        return rows()

    val_dataloader = train_dataloader

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.parametrize("hook", LIGHTNING)
def test_a_hook_of_a_module_is_called_or_refused(hook, tmp_path):
    module, called = recording(Scheduled, hook)
    assert issubclass(module, lightning.LightningModule)
    operator = TrainingOperator.from_lightning(module)
    refused = ""
    try:
        with TorchTrainer(training_operator_cls=operator) as one:
            one.train()
            one.validate()
            one.load(one.save(tmp_path / "state"))
            one.predict(rows())
    except NotAvailableError as error:
        refused = str(error)
    assert (hook in OTHER_LOOPS) != (hook in called or f"the hook {hook} is" in refused)
