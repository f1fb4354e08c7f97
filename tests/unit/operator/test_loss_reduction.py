# SPDX-License-Identifier: Apache-2.0
"""A loss that is a sum over its batch: added over shards, reported per sample.

`lockstep.operator.shard_results` with ``loss_reduction="sum"``.
"""

import pytest
import torch
from tests.unit.trainer.programs import (
    BATCH,
    by_hand,
    linear,
    problem,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError
from lockstep.keys import BATCH_SIZE


def total(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum")


class Summed(TrainingOperator):
    loss_reduction = "sum"

    def setup(self, config):
        self.model = linear()
        self.optimizer = sgd(self.model, lr=0.01)
        self.criterion = nn.MSELoss(reduction="sum")
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        data = torch.utils.data.TensorDataset(*problem())
        batch_size = config.get(BATCH_SIZE, BATCH)
        self.register_data(
            train_loader=torch.utils.data.DataLoader(data, batch_size),
            validation_loader=torch.utils.data.DataLoader(data, batch_size),
        )


class SummedOwn(Summed):
    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), target)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item() / len(features)}


class SummedBackward(SummedOwn):
    def train_batch(self, batch, batch_info):
        features, target = batch
        self.optimizer.zero_grad()
        self.backward(self.criterion(self.model(features), target))
        self.optimizer.step()
        return {}


class ByArgument(Summed):
    loss_reduction = "mean"

    def register(self, **registered):
        return super().register(**registered, loss_reduction="sum")


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("operator", [Summed, SummedOwn, SummedBackward, ByArgument])
def test_the_objective_is_the_sum_over_the_global_batch(operator, num_shards):
    with trainer(operator, config={BATCH_SIZE: BATCH}, num_shards=num_shards) as one:
        one.train(num_steps=6)
        assert same(weights(one.get_model()), by_hand(6, total, lr=0.01))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_reported_loss_is_per_sample_however_the_batch_is_cut(num_shards):
    features, target = problem()
    expected = total(linear()(features), target).item() / len(features)
    with trainer(Summed, config={BATCH_SIZE: BATCH}, num_shards=num_shards) as one:
        assert one.validate()["val_loss"] == pytest.approx(expected, rel=1e-12)
        first = total(linear()(features[:BATCH]), target[:BATCH]).item() / BATCH
        assert one.train(num_steps=1)["train_loss"] == pytest.approx(first, rel=1e-12)


def test_a_sum_takes_no_weight():
    class Weighted(SummedOwn):
        def train_batch(self, batch, batch_info):
            self.backward(self.model(batch[0]).sum(), weight=3)

    with trainer(Weighted) as one, pytest.raises(ConfigurationError, match="sum has no weight"):
        one.train()
