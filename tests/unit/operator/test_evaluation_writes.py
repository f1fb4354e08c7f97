# SPDX-License-Identifier: Apache-2.0
"""What a forward writes in a validation is taken back, and costs copies of no other weights."""

import pytest
import torch
from torch import nn

from lockstep.errors import NotAvailableError
from lockstep.operator import evaluation_writes
from unit.trainer.programs import Regression, linear, loader, sgd, trainer


class Follows(nn.Module):
    """A layer follows another one in evaluation mode, from a forward on; its mean always does.

    Args:
        always: the layer follows in training, too.
    """

    def __init__(self, first, always):
        super().__init__()
        self.leading, self.following = linear(0), linear(1)
        self.following.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.first, self.always, self.num_forwards = first, always, 0

    def forward(self, x):
        if not self.training:
            self.num_forwards += 1
            self.mean.add_(x.mean(0))
        if self.always or (not self.training and self.num_forwards > self.first):
            with torch.no_grad():
                self.following.weight.lerp_(self.leading.weight, 0.1)
        return self.leading(x) - self.following(x) + self.mean.sum()


class Op(Regression):
    def setup(self, config):
        self.model = Follows(config["first"], config.get("always", False))
        self.optimizer = sgd(self.model.leading)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=loader(), validation_loader=loader())


def values(one):
    state = one.get_local_operator().model.state_dict()
    return {name: each.clone() for name, each in state.items()}


def equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_weight_that_is_written_late_is_refused():
    """Nobody has its value from before, and ranks may have written others."""
    with trainer(Op, config={"first": 5}) as one:
        one.validate()
        with pytest.raises(NotAvailableError, match="writes to a weight for the first time"):
            one.validate()


@pytest.fixture
def copied(monkeypatch):
    """The weights that evaluations copy."""
    found = []

    def copy_of_weight(weight):
        found.append(weight)
        return weight.detach().clone()

    monkeypatch.setattr(evaluation_writes, "copy_of_weight", copy_of_weight)
    return found


@pytest.mark.parametrize(("first", "expected"), [(0, 1), (10**6, 0)])
def test_weights_that_no_forward_writes_are_not_copied_again(first, expected, copied):
    with trainer(Op, config={"first": first}) as one:
        one.validate()
        assert len(copied) == 4
        copied.clear()
        one.train()
        before = values(one)
        one.validate()
        assert equal(values(one), before)
        assert len(copied) == expected


@pytest.mark.parametrize(("always", "expected"), [(True, 1), (False, 0)])
def test_behind_training_only_those_are_copied_to_which_its_forwards_write(
    always, expected, copied
):
    """Gradients and the states of optimizers take the memory of a copy of all weights."""
    with trainer(Op, config={"first": 10**6, "always": always}) as one:
        one.train(num_steps=1)
        before = values(one)
        one.validate()
        assert equal(values(one), before)
        assert len(copied) == expected


def test_behind_training_a_weight_to_which_only_evaluations_write_is_refused():
    with trainer(Op, config={"first": 0}) as one:
        one.train(num_steps=1)
        with pytest.raises(NotAvailableError, match="writes to a weight for the first time"):
            one.validate()


class Averaged(Op):
    """An average of a model that writes is evaluated."""

    def setup(self, config):
        self.model = Follows(0, always=True)
        self.optimizer = sgd(self.model.leading)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss(), ema=0.9)
        self.register_data(train_loader=loader(), validation_loader=loader())

    def validate_batch(self, batch, batch_info):
        (average,) = self._lockstep.registered.averages
        average(batch[0])
        return {"num_samples": len(batch[0])}

    def values(self):
        (average,) = self._lockstep.registered.averages
        return {name: each.clone() for name, each in average.state_dict().items()}


def test_behind_training_what_an_average_writes_is_taken_back_as_what_its_model_does(copied):
    with trainer(Averaged, config={"first": 0}) as one:
        one.train()
        operator = one.get_local_operator()
        before = operator.values()
        one.validate()
        assert equal(operator.values(), before)
        assert len(copied) == 2


class Surrounds(Op):
    """Its validation begins with other weights than the call did."""

    def validate(self, iterator, info):
        with torch.no_grad():
            self.model.leading.bias.add_(1)
        return super().validate(iterator, info)


def test_a_copy_for_a_validation_of_the_users_own_is_not_made_twice(copied):
    with trainer(Surrounds, config={"first": 0}) as one:
        before = values(one)
        before["leading.bias"] += 1
        one.validate()
        assert equal(values(one), before)
        assert len(copied) == 1


class Encoder(nn.Module):
    """One layer begins as a copy of another one, which it follows; no version counter tells."""

    def __init__(self):
        super().__init__()
        self.leading, self.following = linear(0), linear(0)
        self.following.requires_grad_(False)

    def forward(self, x):
        self.following.weight.data.lerp_(self.leading.weight.data, 0.01)
        return self.leading(x) - 2 * self.following(x)


class Encodes(Op):
    def setup(self, config):
        self.model = Encoder()
        self.optimizer = sgd(self.model.leading)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=loader(), validation_loader=loader())


def test_an_encoder_that_has_not_moved_before_training_is_put_back_behind_it():
    with trainer(Encodes) as one:
        one.validate()
        one.train()
        before = values(one)
        one.validate()
        assert equal(values(one), before)


def test_it_says_once_what_it_has_taken_back(caplog):
    """Who adds up over a validation in a buffer reads zero after it."""
    with trainer(Op, config={"first": 0}) as one:
        one.validate()
        one.validate()
    (said,) = [each.getMessage() for each in caplog.records if "put back" in each.getMessage()]
    assert "rank 0, step 1" in said
    assert "a weight of shape (2, 3)" in said


class Fails(Op):
    def validate_batch(self, batch, batch_info):
        result = super().validate_batch(batch, batch_info)
        if batch_info["batch_idx"] == 2:
            raise ValueError("the third batch")
        return result


def test_a_validation_that_fails_leaves_the_run_as_it_was():
    with trainer(Fails, config={"first": 0, "always": True}) as one:
        one.train()
        before = values(one)
        with pytest.raises(ValueError, match="the third batch"):
            one.validate()
        assert equal(values(one), before)


class Within(Op):
    """Validates within its own pass over the training data."""

    def train_epoch(self, iterator, info):
        result = super().train_epoch(iterator, info)
        before = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.validate([next(iter(loader()))], {})
        assert equal(self.model.state_dict(), before)
        return result


def test_a_validation_within_training_leaves_the_run_as_it_was():
    with trainer(Within, config={"first": 0, "always": True}) as one:
        assert one.train()["batch_count"] == 4


class SeesAMean(Op):
    """Returns a tensor of the model as a metric."""

    def validate_batch(self, batch, batch_info):
        self.model(batch[0])
        return {"mean": self.model.mean[0], "num_samples": len(batch[0])}


def test_a_metric_is_read_before_its_tensor_is_written_back():
    with trainer(SeesAMean, config={"first": 0}) as one:
        x = loader().dataset.tensors[0]
        assert one.validate()["mean"] == pytest.approx(x[:, 0].mean().item())
