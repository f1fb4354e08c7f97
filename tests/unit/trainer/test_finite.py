# SPDX-License-Identifier: Apache-2.0
"""The step that would put a first NaN or infinity into the weights is not taken, and named."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.errors import NonFiniteError
from unit.trainer.programs import sgd, trainer

BAD_ROW = 13


class Poisoned(TrainingOperator):
    """One sample makes the logarithm of a negative number."""

    def setup(self, config):
        torch.manual_seed(0)
        hidden, last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.model = nn.Sequential(hidden, nn.BatchNorm1d(4), Logarithm(), last).double()
        self.optimizer, self.criterion = sgd(self.model), nn.MSELoss()
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        x = torch.rand(16, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x[BAD_ROW] = config["bad"]
        self.register_data(train_loader=DataLoader(TensorDataset(x, x[:, :1]), 2))


class Logarithm(nn.Module):
    def forward(self, x):
        return x + 0 * x.sum()


class OwnLoop(Poisoned):
    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        self.backward(loss)
        self.optimizer.step()
        return {"train_loss": loss.item()}


def weights(run):
    return {k: v.clone() for k, v in run.get_local_operator().model.state_dict().items()}


def poisoned(operator=Poisoned, bad=float("nan"), **arguments):
    return trainer(operator, num_shards=4, config={"bad": bad}, **arguments)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308])
def test_a_step_that_is_not_finite_is_not_taken_and_says_why(bad):
    with poisoned(bad=bad) as run:
        run.train(num_steps=1)
        parameters = list(run.get_local_operator().model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        with pytest.raises(NonFiniteError) as caught:
            run.train()
        assert all(map(torch.equal, before, parameters))
    said = str(caught.value)
    assert "[LS115] a step would put NaN or infinity into the weights, and was not taken" in said
    assert "in global batch 1 of epoch 0, both from 0" in caught.value.__notes__
    assert "in shard 2, 2 samples on rank 0, the loss is" in said
    assert "check_finite=False" in said


def test_a_backward_that_is_not_finite_is_told_from_a_loss():
    class Root(Poisoned):
        def compute_loss(self, batch, batch_info):
            loss = super().compute_loss(batch, batch_info)
            first = next(self.model.parameters())
            return loss + (first - first.detach()).square().sum().sqrt()

    with poisoned(Root, bad=0.5) as run, pytest.raises(NonFiniteError) as caught:
        run.train()
    assert "the gradient of `0.weight`" in str(caught.value)
    assert "every forward and every loss is finite: the backward is not" in str(caught.value)


def test_a_loop_of_ones_own_does_not_step_either():
    with poisoned(OwnLoop) as run, pytest.raises(NonFiniteError, match="the gradient of"):
        run.train()


def test_who_wants_to_goes_on():
    with poisoned(check_finite=False) as run:
        run.train()
        assert not all(bool(v.isfinite().all()) for v in weights(run).values())


def test_numbers_whose_squares_overflow_are_finite():
    class Large(Poisoned):
        def compute_loss(self, batch, batch_info):
            return super().compute_loss(batch, batch_info) * 1e200

    with poisoned(Large, bad=0.5, clip_grad_norm=None) as run:
        run.get_local_operator().optimizer.param_groups[0]["lr"] = 1e-300
        run.train(num_steps=1)
