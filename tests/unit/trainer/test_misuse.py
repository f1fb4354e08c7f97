# SPDX-License-Identifier: Apache-2.0
"""What a hurried user does to a trainer, and what it answers.

`lockstep.trainer.refused_calls` and `lockstep.trainer.torch_trainer`.
"""

import threading
from functools import partial

import pytest
import torch
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    Regression,
    by_hand,
    linear,
    problem,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep import Callback
from lockstep.errors import (
    ConfigurationError,
    TrainerClosedError,
    WrongTypeError,
    WrongUseError,
)


class Waiting(Regression):
    """Stops in the first step until the test has looked."""

    inside, go_on = threading.Event(), threading.Event()

    def compute_loss(self, batch, batch_info):
        self.inside.set()
        assert self.go_on.wait(20)
        return super().compute_loss(batch, batch_info)


def test_a_second_call_at_the_same_time_is_refused_and_harms_nothing():
    with trainer(Waiting) as one:
        training = threading.Thread(target=one.train)
        training.start()
        assert Waiting.inside.wait(20)
        calls = one.train, one.validate, one.get_model, one.state_dict
        for call in (*calls, one.shutdown, partial(one.shutdown, force=True)):
            with pytest.raises(WrongUseError, match="while another call"):
                call()
        Waiting.go_on.set()
        training.join()
        assert same(weights(one.get_model()), by_hand(4))
    with pytest.raises(TrainerClosedError):
        one.train()


@pytest.mark.parametrize("method", ["validate", "shutdown"])
def test_a_trainer_called_by_its_own_operator_is_refused(method):
    class Calls(Regression):
        def compute_loss(self, batch, batch_info):
            getattr(one, method)()

    with trainer(Calls) as one, pytest.raises(WrongUseError, match="the operator itself"):
        one.train()


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


class Empty(Regression):
    def setup(self, config):
        super().setup(config)
        self.register_data(train_loader=DataLoader(Nothing(), 2))


@pytest.mark.parametrize("num_steps", [None, 10**6])
def test_data_without_a_length_that_holds_nothing_is_said(num_steps):
    with trainer(Empty) as one, pytest.raises(ConfigurationError, match="not one batch"):
        one.train(num_steps=num_steps)


class FilledLater(Regression):
    def setup(self, config):
        super().setup(config)
        self.samples = []
        empty = DataLoader(self.samples, BATCH)
        self.register_data(train_loader=empty, validation_loader=empty)


def test_a_dataset_that_is_filled_after_setup_is_trained_on():
    with trainer(FilledLater) as one:
        for call in (one.train, one.validate):
            with pytest.raises(ConfigurationError, match="not one batch"):
                call()
        assert one.status()["epoch"] == 0
        one.get_local_operator().samples.extend(zip(*problem(), strict=True))
        assert one.train()["epoch"] == 1
        assert same(weights(one.get_model()), by_hand(4))
        assert one.validate()["num_samples"] == SAMPLES


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"callbacks": Callback()}, "callbacks=\\[MyCallback"),
        ({"callbacks": 5}, "callbacks is not a list"),
        ({"callbacks": None}, "callbacks is not a list"),
        ({"resources_per_worker": 3}, "resources_per_worker is not a dict"),
        ({"resources_per_worker": {"TPU": "one"}}, "TPU"),
        ({"scheduler_step_freq": []}, "scheduler_step_freq"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(arguments, named):
    with pytest.raises((WrongTypeError, ConfigurationError), match=named):
        trainer(**arguments)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda loss: (loss, {}, 1), "dict and int"),
        (lambda loss: (loss, 3), "and int"),
        (lambda loss: loss * 1j, "complex128"),
        (lambda loss: None, "NoneType"),
    ],
)
def test_what_compute_loss_may_not_return(returned, got):
    class Wrong(Regression):
        def compute_loss(self, batch, batch_info):
            return returned(super().compute_loss(batch, batch_info))

    with trainer(Wrong) as one, pytest.raises(ConfigurationError, match=got):
        one.train()


def test_a_train_batch_that_returns_nothing():
    class Silent(Regression):
        def train_batch(self, batch, batch_info):
            super().train_batch(batch, batch_info)

    with (
        trainer(Silent) as one,
        pytest.raises(WrongTypeError, match="train_batch returned something else"),
    ):
        one.train()


class Remembering(nn.Module):
    """Leaves tensors of the last forward on itself, as models with an auxiliary loss do."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, features):
        self.latest = self.layer(features)
        self.all_of_them = {"outputs": [self.latest]}
        return self.latest


def operator_of(make_model):
    class Own(Regression):
        def setup(self, config):
            super().setup(config)
            self._lockstep.registered.sync.detach()
            loaders, self._lockstep.registered = self._lockstep.loaders, None
            model = make_model()
            self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
            self._lockstep.loaders = loaders

    return Own


def test_a_model_that_keeps_tensors_of_its_last_forward_can_be_had():
    with trainer(operator_of(Remembering)) as one:
        one.train()
        model = one.get_model()
        assert not model.latest.requires_grad
        assert model.all_of_them["outputs"][0] is model.latest
        assert same(weights(model), by_hand(4))


def test_a_compiled_model_is_saved_and_returned_as_what_it_is_made_from(tmp_path):
    compiled = operator_of(lambda: torch.compile(linear(), backend="eager"))
    with trainer(compiled) as one, trainer() as other:
        one.train()
        assert type(one.get_model()) is nn.Linear
        other.load(one.save(tmp_path / "run.pt"))
        assert same(weights(other.get_model()), by_hand(4))
