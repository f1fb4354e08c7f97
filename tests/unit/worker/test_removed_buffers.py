# SPDX-License-Identifier: Apache-2.0
"""`lockstep.worker.rollback`: a program may take a buffer away, and finds it after an undo."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from unit.trainer.programs import (
    STEPS_PER_EPOCH,
    Regression,
    linear,
    loader,
    same,
    sgd,
    trainer,
    weights,
)

KEPT = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)


def by_hand(model, change):
    """The weights after an epoch, with `change` before its third step."""
    optimizer = sgd(model)
    for step, (features, targets) in enumerate(loader()):
        if step == 2:
            change(model)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    return weights(model)


def pruned():
    return prune.custom_from_mask(linear(), "weight", KEPT)


def unpruned(model):
    prune.remove(model, "weight")


def without_scale(model):
    del model.scale


class OfItsOwn(Regression):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.made()
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=loader())

    def train_batch(self, batch, batch_info):
        self.change()
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class Unprunes(OfItsOwn):
    def made(self):
        model = pruned()
        return model, sgd(model), nn.MSELoss()

    def change(self):
        if self.global_step == 2:
            unpruned(self.model)


def test_a_mask_may_be_removed_in_the_middle_of_a_call():
    with trainer(Unprunes) as run:
        assert run.train()["batch_count"] == STEPS_PER_EPOCH
        mine = run.get_local_operator().model
        assert not list(mine.buffers())
        assert same(weights(mine), by_hand(pruned(), unpruned))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, features):
        return self.layer(features) * getattr(self, "scale", 1.0)


class TakesAway(OfItsOwn):
    def made(self):
        self.fails = True
        model = Scaled()
        return model, sgd(model), nn.MSELoss()

    def change(self):
        if self.global_step == 2:
            without_scale(self.model)
            if self.fails:
                self.fails = False
                raise RuntimeError("once")


def test_a_buffer_that_an_undone_step_has_taken_away_is_there_again():
    with trainer(TakesAway) as run:
        with pytest.raises(RuntimeError, match="once"):
            run.train()
        assert run.get_local_operator().model.scale == 0.5
        run.train()
        mine = run.get_local_operator().model
        assert not hasattr(mine, "scale")
    assert same(weights(mine), by_hand(Scaled(), without_scale))
