# SPDX-License-Identifier: Apache-2.0
"""Calls between two `train`s while an accumulation window is open, whose batches may be undone.

`lockstep.worker.rollback` and `lockstep.worker.state_access` in whole runs of one worker.
"""

import pytest
import torch
from tests.unit.trainer.programs import Regression, loader, sgd, trainer, weights
from torch import nn

# Of a scheduler that steps before the first optimizer does, as in a window it has to.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")

STEPS = 8  # two epochs of four batches


class Normalised(Regression):
    """With running statistics, state of its own, and a schedule."""

    def setup(self, config):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        self.optimizer = sgd(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.register(
            models=self.model,
            optimizers=self.optimizer,
            criterion=nn.MSELoss(),
            schedulers=self.scheduler,
        )
        self.register_data(train_loader=loader(), validation_loader=loader())
        self.seen, self.fails = 0, False

    def validate(self, iterator, info):
        result = super().validate(iterator, info)
        self.seen += 1
        self.fail_once()
        return result

    def compute_loss(self, batch, batch_info):
        if self.model.training:
            self.fail_once()
        return super().compute_loss(batch, batch_info)

    def fail_once(self):
        if self.fails:
            self.fails = False
            raise ValueError("once")


class StepsItself(Normalised):
    """Its schedule has a step in each batch, not in each window."""

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        self.scheduler.step()
        return result


class EpochOfItsOwn(StepsItself):
    def train_epoch(self, iterator, info):
        return super().train_epoch(iterator, info)


class Remembers(Normalised):
    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def run(operator, **arguments):
    return trainer(operator, accumulate=4, scheduler_step_freq="manual", **arguments)


def found(one):
    operator = one.get_local_operator()
    rate = operator.optimizer.param_groups[0]["lr"]
    statistics = operator.model[0].running_mean.clone(), operator.model[0].num_batches_tracked
    return rate, statistics[0].tolist(), int(statistics[1]), weights(operator.model).tolist()


def finish(one):
    while (left := STEPS - one.status()["step"]) > 0:
        one.train(num_steps=min(left, 3))
    return found(one)


def fail_next(one):
    one.get_local_operator().fails = True


@pytest.mark.parametrize("operator", [Normalised, StepsItself])
def test_a_validation_that_fails_leaves_the_statistics_of_the_window_s_start(operator):
    """It restored those from after the window's batches, which were then computed once more."""
    with run(operator) as one:
        expected = finish(one)
    with run(operator) as one:
        one.train(num_steps=2)
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.validate()
        assert finish(one) == expected


@pytest.mark.parametrize("operator", [Normalised, StepsItself])
def test_an_update_of_the_schedulers_outlives_an_undo(operator):
    """An undo of the window took it back with the batches."""
    with run(operator) as one:
        one.update_scheduler(0.0)
        expected = finish(one)
    with run(operator) as one:
        one.train(num_steps=2)
        one.update_scheduler(0.0)
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.train(num_steps=1)
        assert finish(one) == expected


def test_what_a_validation_changes_of_the_user_s_state_is_saved():
    with run(Remembers) as one:
        one.train(num_steps=2)
        one.validate()
        assert one.get_local_operator().seen == 1
        state = one.state_dict()
        assert state["operator"] == {"seen": 1}
        expected = finish(one)
    with run(Remembers) as one:
        one.load_state_dict(state)
        assert finish(one) == expected
        assert one.get_local_operator().seen == 1


@pytest.mark.parametrize("operator", [Normalised, StepsItself, EpochOfItsOwn])
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_a_state_that_is_saved_in_a_window_has_the_schedule_of_its_start(operator, steps):
    """The window's batches are computed again, and their schedulers step again."""
    with run(operator) as one:
        expected = finish(one)
    with run(operator) as one:
        one.train(num_steps=steps)
        state = one.state_dict()
        assert finish(one) == expected
    with run(operator) as one:
        one.load_state_dict(state)
        assert finish(one) == expected


@pytest.mark.parametrize("operator", [StepsItself, EpochOfItsOwn])
def test_a_call_that_is_undone_to_the_window_s_start_has_the_schedule_of_then(operator):
    with run(operator) as one:
        expected = finish(one)
    with run(operator) as one:
        one.train(num_steps=2)
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.train(num_steps=1)
        assert finish(one) == expected


class Registers(nn.Module):
    """Its forward registers a buffer, the sum of what it has seen, in the second batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.num_forwards = nn.Linear(3, 2).double(), 0

    def forward(self, x):
        self.num_forwards += 1
        if self.num_forwards == 1:
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.seen.add_(x.detach().sum(0))
        return self.linear(x)


class RegistersLate(Normalised):
    def setup(self, config):
        self.model = Registers()
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=loader())
        self.fails = False


def test_a_window_in_which_a_buffer_was_registered_is_undone():
    """The undo itself failed, in every later call: it looked for the buffers of another call."""
    with trainer(RegistersLate, accumulate=4) as one:
        one.train(num_steps=STEPS)
        expected = weights(one.get_model())
    with trainer(RegistersLate, accumulate=4) as one:
        one.train(num_steps=1)
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.train(num_steps=2)
        assert one.status()["step"] == 0
        one.train(num_steps=STEPS)
        assert torch.equal(weights(one.get_model()), expected)


class Decays(Normalised):
    """Its loss changes a setting of the optimizer, from the one before."""

    def setup(self, config):
        super().setup(config)
        if config["tensor"]:
            self.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)

    def compute_loss(self, batch, batch_info):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        return super().compute_loss(batch, batch_info)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_settings_that_the_loss_changes_are_undone(accumulate, tensor):
    """A step that was computed again changed them again."""
    arguments = {"scheduler_step_freq": "manual", "accumulate": accumulate}
    with trainer(Decays, config={"tensor": tensor}, **arguments) as one:
        expected = finish(one)
    with trainer(Decays, config={"tensor": tensor}, **arguments) as one:
        one.train(num_steps=2)
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.validate()
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.train()
        one.train(num_steps=3)
        state = one.state_dict()
        assert finish(one) == expected
    with trainer(Decays, config={"tensor": tensor}, **arguments) as one:
        one.load_state_dict(state)
        assert finish(one) == expected


def test_settings_that_the_program_changes_in_a_window_outlive_an_undo():
    with run(Normalised) as one:
        one.train(num_steps=2)
        one.get_local_operator().optimizer.param_groups[0]["lr"] = 0.025
        one.train(num_steps=1)
        fail_next(one)
        with pytest.raises(ValueError, match="once"):
            one.train()
        assert finish(one)[0] == 0.025
