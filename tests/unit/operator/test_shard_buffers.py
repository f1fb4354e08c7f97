# SPDX-License-Identifier: Apache-2.0
"""A buffer that is None until the first forward is one: shards begin with what is committed."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.operator.shard_buffers import BufferSnapshot


class Scaled(nn.Module):
    """The first batch sets its scale, and says so."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("scale", None)
        self.filled = []
        self.fails = False

    def forward(self, x):
        now = x.detach().abs().mean(0)
        self.filled.append(self.scale is None)
        self.scale = now if self.scale is None else 0.9 * self.scale + 0.1 * now
        if self.fails:
            raise LookupError
        return self.layer(x / self.scale)


class Scaling(Regression):
    def setup(self, config):
        model = Scaled()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader(), validation_loader=loader())


def test_each_shard_of_the_first_step_begins_without_it():
    with trainer(Scaling, num_shards=2) as run:
        run.train(num_steps=2)
        assert run.get_local_operator().model.filled == [True, True, False, False]


def test_a_step_that_fails_and_is_taken_again_begins_without_it():
    with trainer(Scaling) as run:
        model = run.get_local_operator().model
        model.fails = True
        with pytest.raises(LookupError):
            run.train(num_steps=1)
        model.fails = False
        run.train(num_steps=1)
        assert model.filled == [True, True]


def test_what_is_tried_out_leaves_it_empty():
    with trainer(Scaling) as run:
        assert run.verify(num_steps=1).ok
        assert run.get_local_operator().model.scale is None


ROWS = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TARGETS = torch.tensor([0, 1, 1, 0, -100, -100, -100, -100, 1, 1, 0, 0])


class Classifies(Regression):
    """The second of three batches has no target that counts; the first one has all."""

    def setup(self, config):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(ROWS, TARGETS), 4))


def test_a_batch_whose_targets_are_all_ignored_leaves_the_statistics():
    with trainer(Classifies, accumulate=3) as run:
        run.train()
        found = run.get_model()[0].running_mean
    norm = nn.BatchNorm1d(3).double()
    for part in (ROWS[:4], ROWS[8:]):
        norm(part)
    assert (found - norm.running_mean).abs().max() <= 1e-12


def test_the_start_of_a_window_has_a_shared_buffer_under_each_of_its_names():
    """A load writes both values into one tensor, so that the last one stays."""
    module = nn.Module()
    module.register_buffer("one", torch.zeros(2))
    module.register_buffer("same", module.one)
    before = BufferSnapshot([module])
    module.one.add_(1)
    state = dict(module.state_dict())
    before.put_into([state])
    assert not state["one"].any()
    assert not state["same"].any()
