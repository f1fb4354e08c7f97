# SPDX-License-Identifier: Apache-2.0
"""Weights that change besides the one step of a batch: in a forward, by hand, by a second step."""

import os
import signal

import pytest
import torch
from tests.ray.surviving import Classifier, Momentum, TwoPlayers, _data, digest, trainer_of
from torch import nn
from torch.utils.data import DataLoader

from lockstep import TrainingOperator
from lockstep.errors import WorkerDiedError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike

# Each death starts a process that imports torch: seconds, and many where the processors are busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class OwnMomentum(Momentum):
    def train_batch(self, batch, batch_info):
        features, classes = batch
        loss = self.criterion(self.model(features), classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class ByHand(Momentum):
    """The optimizer that it registered never steps."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        loss = self.criterion(self.model(features), classes)
        self.model.zero_grad()
        loss.backward()
        for parameter in self.model.leading.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        return {"train_loss": loss.item()}


class Critic(TwoPlayers):
    """The second player steps in every third batch only."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        for player in range(2 if self.global_step % 3 == 2 else 1):
            output = self.models[0](features)
            if player:
                output = self.models[1](output.detach())
            loss = nn.functional.cross_entropy(output, classes)
            self.optimizers[player].zero_grad()
            loss.backward()
            self.optimizers[player].step()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize(
    ("operator_cls", "accumulate", "step", "phase"),
    [
        (Momentum, 1, 1, "backward"),
        (Momentum, 1, 5, "backward"),
        (Momentum, 2, 5, "buckets"),
        (OwnMomentum, 1, 5, "backward"),
        (ByHand, 1, 3, "backward"),
        (Critic, 1, 2, "applied"),
    ],
)
def test_they_are_those_of_the_undisturbed_run(operator_cls, accumulate, step, phase):
    found = []
    for strikes in ([], [Strike("kill", rank=1, step=step, phase=phase)]):
        spares = len(strikes)
        arguments = {"accumulate": accumulate, "spare_workers": spares}
        with trainer_of(operator_cls, strikes, **arguments) as trainer:
            trainer.train(num_steps=7)
            found.append(digest(trainer))
            assert len(trainer.status()["recoveries"]) == spares
    assert found[0] == found[1]


class Target(TrainingOperator):
    """A second network is brought up to date in some steps, the first of them after the third."""

    def setup(self, config):
        self.leading, self.following = nn.Linear(10, 5), nn.Linear(10, 5)
        self.register(
            models=[self.leading, self.following],
            optimizers=torch.optim.Adam(self.leading.parameters(), lr=0.01),
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))

    def compute_loss(self, batch, batch_info):
        features, classes = batch
        if self.global_step in (4, 6, 11):
            pairs = zip(self.leading.parameters(), self.following.parameters(), strict=True)
            with torch.no_grad():
                for leader, follower in pairs:
                    follower.lerp_(leader, 0.5)
        both = self.leading(features) + self.following(features).detach()
        return nn.functional.cross_entropy(both, classes)


class TargetOfTwo(Target):
    """The weights that its optimizers change are copied before the first of them steps."""

    def setup(self, config):
        self.leading, self.following, self.head = (nn.Linear(n, 5) for n in (10, 10, 5))
        self.first, self.second = (
            torch.optim.Adam(each.parameters(), lr=0.01) for each in (self.leading, self.head)
        )
        self.register(
            models=[self.leading, self.following, self.head],
            optimizers=[self.first, self.second],
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))

    def train_batch(self, batch, batch_info):
        features, classes = batch
        loss = self.compute_loss(batch, batch_info)
        self.first.zero_grad()
        loss.backward()
        self.first.step()
        loss = nn.functional.cross_entropy(self.head(self.leading(features).detach()), classes)
        self.second.zero_grad()
        loss.backward()
        self.second.step()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize(
    ("operator_cls", "strikes"),
    [
        (Target, [Strike("kill", rank=1, step=6, phase="backward")]),
        (TargetOfTwo, [Strike("kill", rank=1, step=6, phase="applied")]),
        # Who took the place of the first has not seen the weights written in its own first steps.
        (
            Target,
            [
                Strike("kill", rank=1, step=7, phase="backward"),
                Strike("kill", rank=0, step=11, phase="backward"),
            ],
        ),
    ],
)
def test_a_write_that_begins_later_is_undone_from_then_on(operator_cls, strikes):
    found = []
    for struck in ([], strikes):
        with trainer_of(operator_cls, struck, spare_workers=len(struck)) as trainer:
            trainer.train(num_steps=13)
            found.append(digest(trainer))
            assert len(trainer.status()["recoveries"]) == len(struck)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("operator_cls", "phase"), [(Target, "backward"), (TargetOfTwo, "applied")]
)
def test_a_death_in_the_step_of_the_first_write_ends_the_run(operator_cls, phase):
    """Nobody has the weights as they were; written twice they would be others."""
    strikes = [Strike("kill", rank=1, step=4, phase=phase)]
    with (
        trainer_of(operator_cls, strikes, spare_workers=1) as trainer,
        pytest.raises(WorkerDiedError, match="no worker is left"),
    ):
        trainer.train(num_steps=11)


@pytest.mark.parametrize("use_local", [False, True])
def test_a_death_between_calls_is_found_by_verify(use_local):
    """It forms a second group, in which nobody waits for the dead."""
    with trainer_of(Classifier, spare_workers=1, use_local=use_local) as trainer:
        trainer.train(num_steps=3)
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        assert trainer.verify().ok
        assert len(trainer.status()["recoveries"]) == 1


@pytest.mark.parametrize("batch", [16, 103])
def test_a_follower_moves_once_in_a_step_at_any_number_of_workers(batch):
    """Of 104 rows one is left behind a batch of 103: workers without a row move it all the same."""
    found = set()
    for num_workers in (1, 2, 3):
        arguments = {"num_workers": num_workers, "num_shards": 3, "config": {BATCH_SIZE: batch}}
        with trainer_of(Momentum, reproducible=True, **arguments) as trainer:
            trainer.train(num_steps=8)
            found.add(digest(trainer))
    assert len(found) == 1


@pytest.mark.parametrize("sync", ["replicate", "ddp", "parameter_server"])
def test_a_follower_moves_once_in_a_step_under_every_sync(sync):
    models = []
    for arguments in ({"num_workers": 1, "num_shards": 4}, {"num_shards": 4, "sync": sync}):
        with trainer_of(Momentum, config={BATCH_SIZE: 103}, **arguments) as trainer:
            trainer.train(num_steps=6)
            models.append(trainer.get_model().state_dict())
    torch.testing.assert_close(*models)


def test_a_follower_moves_once_in_a_step_after_a_death_without_a_spare():
    found = []
    for strikes in ([], [Strike("kill", rank=1, step=2, phase="backward")]):
        with trainer_of(Momentum, strikes, reproducible=True) as trainer:
            trainer.train(num_steps=7)
            found.append(digest(trainer))
            assert len(trainer.status()["recoveries"]) == len(strikes)
    assert found[0] == found[1]


class Scaled(nn.Module):
    """Its first forward fills one buffer, and its first ones enlarge another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, features):
        if self.scale is None:
            self.scale = torch.full((2,), 3.0)
        if len(self.table) < 3:
            self.table = torch.ones(len(self.table) + 1)
        return features / self.scale.mean() * self.table.mean()


class FillsBuffers(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        layers = [nn.Linear(10, 12), nn.Sequential(nn.Tanh(), nn.Linear(12, 5))]
        model = nn.Sequential(Scaled(), *layers)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
            shard=config["shard"],
        )
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))


@pytest.mark.parametrize(
    ("sync", "shard"),
    [("replicate", "whole"), ("ddp", "whole"), ("fsdp", "whole"), ("fsdp", [nn.Sequential])],
)
def test_a_worker_joins_whose_buffers_no_forward_has_filled(sync, shard):
    arguments = {"sync": sync, "config": {BATCH_SIZE: 12, "shard": shard}}

    def trained(*strikes, **further):
        with trainer_of(FillsBuffers, strikes, **arguments, **further) as trainer:
            trainer.train(), trainer.train(num_steps=3)
            return digest(trainer), len(trainer.status()["recoveries"])

    expected, _ = trained()
    assert trained(Strike("kill", rank=1, step=4, phase="backward"), spare_workers=1) == (
        expected,
        1,
    )
