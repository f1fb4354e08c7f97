# SPDX-License-Identifier: Apache-2.0
"""A `collate_fn` that leaves samples out, on two workers; see `lockstep.data.collated_rows`."""

import pytest
from tests.ray.operators import farthest, net, problem, sgd
from torch import nn
from torch.utils.data import DataLoader, default_collate

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import WeightError
from lockstep.keys import BATCH_SIZE, WEIGHT

MISSING = (2, 3, 11, 12, 30)
NUM_SAMPLES, BATCH = 36, 12


def without_missing(numbers):
    features, targets = problem()
    rows = [number for number in numbers if number not in MISSING]
    return default_collate([(features[row], targets[row]) for row in rows])


class Holes(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := net()), optimizers=sgd(model), criterion=nn.MSELoss()
        )
        loader = DataLoader(range(NUM_SAMPLES), config[BATCH_SIZE], collate_fn=without_missing)
        self.register_data(train_loader=loader)


class Weighed(Holes):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {WEIGHT: len(batch[0])}


class PlainBackward(Holes):
    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


def started(operator):
    return TorchTrainer(training_operator_cls=operator, num_workers=2, config={BATCH_SIZE: BATCH})


@pytest.mark.parametrize("operator", [Holes, PlainBackward])
def test_a_rank_does_not_count_for_samples_that_its_batch_does_not_hold(operator):
    with (
        started(operator) as trainer,
        pytest.raises(WeightError, match=r"returned [45] of 6 samples"),
    ):
        trainer.train()


@pytest.mark.slow
def test_a_loss_with_a_weight_of_its_own_is_exact_without_them():
    model = net()
    optimizer = sgd(model)
    for start in range(0, NUM_SAMPLES, BATCH):
        features, targets = without_missing(range(start, start + BATCH))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    with started(Weighed) as trainer:
        trainer.train()
        assert farthest(trainer.get_model(), model) < 1e-12
