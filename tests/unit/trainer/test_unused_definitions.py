# SPDX-License-Identifier: Apache-2.0
"""A slip of a method's name is found before anything starts; helpers keep their names."""

import pytest
from tests.unit.trainer.programs import Regression, trainer

from lockstep import Callback, TrainingOperator
from lockstep.errors import ConfigurationError


def with_method(name, base=Regression):
    return type("Mine", (base,), {name: lambda self, *_: None, "__module__": __name__})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train" + "_bach", "train_batch"),
        ("train" + "_batchs", "train_batch"),
        ("training" + "_epoch", "train_epoch"),
        ("computes" + "_loss", "compute_loss"),
        ("validation" + "_batch", "validate_batch"),
        ("set" + "_up", "setup"),
        ("state" + "_dicts", "state_dict"),
        ("training" + "_step", "compute_loss, or train_batch"),
        ("validation" + "_step", "validate_batch"),
        ("configure" + "_optimizers", "setup, which calls self.register"),
    ],
)
def test_a_method_that_nobody_would_call(name, meant):
    with pytest.raises(ConfigurationError, match=rf"Mine.{name} would never be used") as refusal:
        trainer(with_method(name))
    assert f"call it {meant}" in str(refusal.value)


def test_a_setting_that_nobody_would_read():
    class Slip(Regression):
        joint_losses = True

    with pytest.raises(ConfigurationError, match=r"joint_losses would[^$]*call it joint_loss;"):
        trainer(Slip)


class Helped(Regression):
    """Each helper is called, by the class or from outside."""

    def train_batches(self):
        return {}

    def compute_losses(self, batch):
        return super().compute_loss(batch, {})

    def compute_loss(self, batch, batch_info):
        terms = [self.compute_losses(part) for part in (batch,)]
        return sum(terms)

    def train_one_batch(self):
        pass

    def validate_everything(self):
        pass

    def log_loss(self):
        pass


class WithMixin(type("Mixin", (), {"on_epoch_end": lambda self: None}), Regression):
    """Another package calls it."""


@pytest.mark.parametrize("operator", [Helped, WithMixin, TrainingOperator])
def test_helpers_are_left_alone(operator):
    if operator is TrainingOperator:
        with pytest.raises(NotImplementedError, match="must override setup"):
            trainer(operator)
        return
    with trainer(operator) as one:
        one.train()
        assert one.apply_all_operators(lambda each: hasattr(each, "model")) == [True]
        if operator is Helped:
            assert one.apply_all_operators(lambda each: each.train_batches()) == [{}]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("on_train" + "_ends", "on_train_end"), ("on_validation" + "_end", "on_validate_end")],
)
def test_a_callback_that_nobody_would_call(name, meant):
    callback = with_method(name, Callback)()
    with pytest.raises(ConfigurationError, match=rf"Mine.{name} would[^$]*call it {meant};"):
        trainer(callbacks=[callback])


def test_hooks_that_a_callback_calls_itself_are_its_own():
    class Own(Callback):
        def on_best(self, result):
            self.best = result

        def on_train_end(self, trainer, result):
            self.on_best(result)

    own = Own()
    with trainer(callbacks=[own]) as one:
        one.train()
    assert own.best["batch_count"] == 4
