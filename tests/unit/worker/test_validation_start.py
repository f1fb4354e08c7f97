# SPDX-License-Identifier: Apache-2.0
"""What a `validate` of the user's own has changed when it fails goes back with it.

`lockstep.worker.validation_start` in whole runs.
"""

import pytest
import torch
from torch import nn

from unit.trainer.programs import (
    SAMPLES,
    STEPS_PER_EPOCH,
    Regression,
    loader,
    sgd,
    trainer,
    weights,
)


def copies(operator):
    """Weights that are written over the model's, and back."""
    with torch.no_grad():
        for parameter, average in zip(operator.model.parameters(), operator.averages, strict=True):
            held = parameter.clone()
            parameter.copy_(average)
            average.copy_(held)


def exchanges(operator):
    """Memory that the model's parameters and the averages take from each other."""
    for parameter, average in zip(operator.model.parameters(), operator.averages, strict=True):
        parameter.data, average.data = average.data, parameter.data


def calibrates(operator):
    """Statistics, modes and flags of the model itself."""
    operator.model.train().requires_grad_(not operator.model[0].weight.requires_grad)
    operator.model[0].running_mean.add_(1)


class Swaps(Regression):
    """Evaluates the averages of its weights, whose swap no ``finally`` undoes."""

    how = staticmethod(copies)

    def setup(self, config):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        self.optimizer = sgd(self.model)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=loader(), validation_loader=loader())
        self.averages = [each.detach().clone() for each in self.model.parameters()]

    def after_step(self):
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    def validate(self, iterator, info):
        self.how(self)
        result = super().validate(iterator, info)
        self.how(self)
        return result

    def validate_batch(self, batch, batch_info):
        self.num_copies = len(self._lockstep.evaluation_writes.copied_elsewhere)
        if batch_info.get("fails"):
            raise LookupError
        return super().validate_batch(batch, batch_info)

    def state_dict(self):
        return {"averages": self.averages}

    def load_state_dict(self, state):
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.copy_(saved)


class Exchanges(Swaps):
    how = staticmethod(exchanges)


class Calibrates(Swaps):
    how = staticmethod(calibrates)


class AddsMetric(Swaps):
    """The usual way to add a metric: no weight is copied for it."""

    validate = Regression.validate

    def validate_batch(self, batch, batch_info):
        return {**super().validate_batch(batch, batch_info), "metric": 1.0}


@pytest.mark.parametrize(("operator", "is_copied"), [(AddsMetric, False), (Swaps, True)])
def test_weights_are_copied_where_code_runs_around_a_validation_and_until_it_has_ended(
    operator, is_copied
):
    """Behind it no peer can fail that would take this worker back, and the memory is free."""
    with trainer(operator) as run:
        run.validate()
        held = run.get_local_operator()
        assert held.num_copies == (4 if is_copied else 0)
        assert not held._lockstep.evaluation_writes.copied_elsewhere


class CountsBatches(AddsMetric):
    """Its `validate_batch` alone is its own; what that counts is saved."""

    count = 0

    def validate_batch(self, batch, batch_info):
        self.count += 1
        return super().validate_batch(batch, batch_info)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_what_a_batch_has_counted_goes_back_with_a_validation_that_failed():
    with trainer(CountsBatches) as run:
        run.validate()
        for _ in range(2):
            with pytest.raises(LookupError):
                run.validate(info={"fails": True})
        run.validate()
        assert run.get_local_operator().count == 2 * STEPS_PER_EPOCH


class Warmup:
    """A scheduler with nothing to save."""

    def step(self):
        """Nothing is due."""


class KeepsNoState(Regression):
    def setup(self, config):
        model = nn.Linear(3, 2).double()
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss(), schedulers=Warmup()
        )
        self.register_data(train_loader=loader(), validation_loader=loader())

    def validate(self, iterator, info):
        return super().validate(iterator, info)


def test_a_scheduler_that_keeps_no_state_is_not_asked_for_it():
    with trainer(KeepsNoState, scheduler_step_freq="manual") as run:
        run.train()
        assert run.validate()["num_samples"] == SAMPLES


def finished(run):
    found = [run.train()["train_loss"], run.validate()["val_loss"]]
    operator = run.get_local_operator()
    modes = [(each.training, each.weight.requires_grad) for each in operator.model]
    tensors = [weights(run.get_model()), *operator.averages, *operator.model.buffers()]
    return found, modes, [each.detach().clone() for each in tensors]


@pytest.mark.parametrize("operator", [Swaps, Exchanges, Calibrates])
def test_a_run_ends_as_one_whose_validation_did_not_fail(operator):
    with trainer(operator) as run:
        run.train(num_steps=3)
        found, modes, expected = finished(run)
    with trainer(operator) as run:
        run.train(num_steps=3)
        memory = [each.data_ptr() for each in run.get_local_operator().model.parameters()]
        for _ in range(3):
            with pytest.raises(LookupError):
                run.validate(info={"fails": True})
        got = finished(run)
        held = run.get_local_operator().model.parameters()
        assert [each.data_ptr() for each in held] == memory
    assert got[:2] == (found, modes)
    assert all(torch.equal(one, other) for one, other in zip(got[2], expected, strict=True))
