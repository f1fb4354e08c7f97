# SPDX-License-Identifier: Apache-2.0
"""``TorchTrainer(sync="fsdp")``: optimizers in shards on real workers, whole weights everywhere."""

import os

import pytest
import torch
from tests.ray.operators import (
    GLOBAL_BATCH,
    STEPS,
    DefaultLoop,
    farthest,
    net,
    one_process,
    problem,
    sgd,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


class OwnStep(DefaultLoop):
    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class ListedOnce(DefaultLoop):
    """Lists its parameters before anything has seen them, as programs do."""

    def setup(self, config):
        model = net()
        self.listed = list(model.parameters())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader)

    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        self.seen = [param.detach().clone() for param in self.listed]
        nn.utils.clip_grad_norm_(self.listed, 0.1)
        self.optimizer.step()
        with torch.no_grad():
            for param in self.listed:
                param.clamp_(-0.4, 0.4)
        return {"train_loss": loss.item()}


def held_all_along(operator):
    now = [param.detach().clone() for param in operator.listed]
    same = zip(operator.listed, operator.model.parameters(), strict=True)
    return all(one is other for one, other in same), now


def trainer(operator=DefaultLoop, **arguments):
    return TorchTrainer(
        training_operator_cls=operator, config={BATCH_SIZE: GLOBAL_BATCH}, **arguments
    )


def part_of_first_layer(operator):
    momentum = operator.optimizer.state[operator.model.first.weight]["momentum_buffer"]
    return momentum.to_local().numel()


@pytest.mark.slow
def test_the_weights_of_one_process_and_a_directory_that_goes_on_anywhere(tmp_path):
    # 37 samples in batches of 12: the last batch of an epoch has one sample, for rank 0.
    with trainer(num_workers=3, sync="fsdp") as run:
        run.train(num_steps=STEPS - 4)
        assert run.validate()["num_samples"] == 37
        path = run.save(tmp_path / "state")
        run.train(num_steps=4)
        trained = run.get_model()
        parts = run.apply_all_operators(part_of_first_layer)
    assert type(trained) is type(net())
    assert farthest(trained, one_process()) < 1e-12
    # No rank holds more than its rows of the momentum.
    assert parts == [15, 15, 5]
    assert os.path.isdir(path)
    with trainer(num_shards=3, sync="replicate") as other:
        other.load(path)
        other.train(num_steps=4)
        assert farthest(other.get_model(), trained) < 1e-12


def test_what_was_listed_before_register_is_what_is_trained():
    with trainer(ListedOnce, num_shards=2) as alone:
        alone.train(num_steps=5)
        expected = alone.get_model()
    with trainer(ListedOnce, num_workers=2, sync="fsdp") as run:
        run.train(num_steps=5)
        for is_same, weights in run.apply_all_operators(held_all_along):
            assert is_same
            pairs = zip(weights, expected.parameters(), strict=True)
            assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12


@pytest.mark.slow
def test_half_precision():
    with trainer(num_workers=2, sync="fsdp", precision="fp16", clip_grad_norm=1.0) as run:
        run.train(num_steps=3)
        got = run.get_model()
    with trainer(num_workers=2, precision="fp16", clip_grad_norm=1.0) as other:
        other.train(num_steps=3)
        assert farthest(got, other.get_model()) < 1e-12


@pytest.mark.slow
def test_a_step_of_ones_own_and_a_file_of_another_sync(tmp_path):
    with trainer(num_shards=2) as alone:
        alone.train(num_steps=STEPS - 4)
        file = alone.save(tmp_path / "file")
    with trainer(OwnStep, num_workers=2, sync="fsdp") as run:
        run.load(file)
        run.train(num_steps=4)
        assert farthest(run.get_model(), one_process()) < 1e-12
