# SPDX-License-Identifier: Apache-2.0
"""A worker dies while gradients of several batches are being gathered, across epochs and calls."""

import os
import signal

import pytest
import torch
from tests.ray.surviving import Classifier, Windows, _data, _network, digest, trainer_of
from tests.ray.test_recovery import counts, train_by_parts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.errors import LockstepError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike

# Each death starts a process that imports torch: seconds, and many where the processors are busy.
pytestmark = pytest.mark.timeout(400)


class LeavesGradients(Classifier):
    """Steps after every second batch of the run, whichever epoch or call it is in."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        if self.global_step % 2 == 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss.item()}


class OwnEpochs(Classifier):
    """The same in an epoch's loop of its own; what is left of an epoch goes into the next."""

    def train_epoch(self, iterator, info):
        for features, classes in iterator:
            loss = self.criterion(self.model(features), classes)
            loss.backward()
            if self.global_step % 2 == 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {"train_loss": loss.item()}


def same_as_undisturbed(operator_cls, strikes, parts, **arguments):
    arguments = {"scheduler_step_freq": "batch", **arguments}
    with trainer_of(operator_cls, **arguments) as trainer:
        expected, bits = train_by_parts(trainer, 2, parts)
    spares = len(strikes)
    with trainer_of(operator_cls, strikes, spare_workers=spares, **arguments) as trainer:
        results, got = train_by_parts(trainer, 2 + spares, parts)
        status = trainer.status()
    assert got == bits
    assert counts(results) == counts(expected)
    assert status["step"] == sum(parts)
    assert len(status["recoveries"]) == len(strikes)
    assert all(each["same_bits"] for each in status["recoveries"])
    return expected, results


@pytest.mark.slow
@pytest.mark.parametrize(
    "strikes",
    [
        pytest.param(
            [Strike("kill", rank=1, step=3, phase="backward")], id="where_the_next_begins"
        ),
        pytest.param(
            [Strike("kill", rank=0, step=2, phase="backward")],
            id="where_the_call_ends",
        ),
        pytest.param(
            [
                Strike("kill", rank=0, step=8, phase="forward"),
                Strike("kill", rank=0, step=8, phase="backward"),
            ],
            id="twice",
        ),
    ],
)
def test_a_window_that_an_earlier_call_began(strikes):
    """`accumulate` over calls: what was gathered on the dead is computed again, and not counted."""
    expected, results = same_as_undisturbed(Classifier, strikes, (3, 3, 3), accumulate=2)
    # What the dead had counted in the call is missing from its mean.
    assert results[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [Windows, LeavesGradients, OwnEpochs])
@pytest.mark.parametrize(
    ("strikes", "parts"),
    [
        ([Strike("kill", rank=1, step=9, phase="buckets")], (4, 4, 4)),
        ([Strike("kill", rank=0, step=7, phase="buckets")], (14,)),
        (
            [
                Strike("kill", rank=0, step=3, phase="forward"),
                Strike("kill", rank=0, step=3, phase="buckets"),
            ],
            (3, 6, 7),
        ),
    ],
)
def test_windows_of_a_loops_own(operator_cls, strikes, parts):
    """Epochs have seven batches: gradients wait at the end of one, and at the end of a call."""
    same_as_undisturbed(operator_cls, strikes, parts)


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [Classifier, LeavesGradients, OwnEpochs])
@pytest.mark.parametrize("call", ["state_dict", "train"])
def test_a_death_between_calls(operator_cls, call):
    arguments = {"scheduler_step_freq": "batch"}
    if operator_cls is Classifier:
        arguments["accumulate"] = 2
    found = []
    for dies in (False, True):
        with trainer_of(operator_cls, spare_workers=1, **arguments) as trainer:
            trainer.train(num_steps=3)
            if dies:
                os.kill(trainer.apply_all_workers(os.getpid)[0], signal.SIGKILL)
            if call == "state_dict":
                trainer.state_dict()
            result = trainer.train(num_steps=3)
            assert len(trainer.status()["recoveries"]) == dies
            found.append((digest(trainer), counts([result]), trainer.status()["step"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_state_that_is_loaded_within_a_window_is_where_a_step_goes_back_to():
    found = []
    for strikes in ([], [Strike("kill", rank=1, step=2, phase="backward")]):
        arguments = {"spare_workers": 1, "scheduler_step_freq": "batch"}
        with trainer_of(LeavesGradients, strikes, **arguments) as trainer:
            trainer.train(num_steps=2)
            state = trainer.state_dict()
            trainer.train(num_steps=3)
            trainer.load_state_dict(state)
            trainer.train(num_steps=4)
            found.append((digest(trainer), trainer.status()["step"]))
    assert found[0] == found[1]


class MomentumByHand(Classifier):
    """No gradient is ever cleared: each step adds to half of those of the step before."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        loss = self.criterion(self.model(features), classes)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


class MomentumByHandInEpochs(MomentumByHand):
    """The same in an epoch's loop of its own, which a death undoes as a whole."""

    def train_epoch(self, iterator, info):
        for batch in iterator:
            result = self.train_batch(batch, info)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [MomentumByHand, MomentumByHandInEpochs])
@pytest.mark.parametrize(
    ("strikes", "parts"),
    [
        ([Strike("kill", rank=1, step=1, phase="backward")], (4,)),
        ([Strike("kill", rank=0, step=9, phase="forward")], (4, 8)),
        (
            [
                Strike("kill", rank=0, step=6, phase="buckets"),
                Strike("kill", rank=1, step=9, phase="optimizer"),
            ],
            (5, 7),
        ),
    ],
)
def test_gradients_that_are_never_cleared(operator_cls, strikes, parts):
    """A step that is computed again adds to what the step before it left, and so do the new."""
    same_as_undisturbed(operator_cls, strikes, parts)


class WarmUpByHand(Classifier):
    """Sets the learning rate of a group that it has kept since its setup."""

    def setup(self, config):
        super().setup(config)
        self.group = self.optimizer.param_groups[0]

    def train_batch(self, batch, batch_info):
        self.group["lr"] = 0.01 * (1 + self.global_step)
        return super().train_batch(batch, batch_info)


@pytest.mark.slow
def test_a_learning_rate_that_is_set_by_hand():
    """The group stays the one that the optimizer reads, on survivors and newcomers."""
    strikes = [
        Strike("kill", rank=1, step=1, phase="backward"),
        Strike("kill", rank=0, step=5, phase="optimizer"),
    ]
    same_as_undisturbed(WarmUpByHand, strikes, (8,))


class TwoPlayersByTwo(TrainingOperator):
    """Two optimizers step after every second batch, the second after further communication."""

    def setup(self, config):
        models = [nn.Linear(10, 5), nn.Linear(5, 5)]
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in optimizers]
        self.models, self.optimizers, _ = self.register(
            models=models, optimizers=optimizers, schedulers=schedulers
        )
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(64, 10, generator=generator)
        data = TensorDataset(features, torch.randint(5, (64,), generator=generator))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True))

    def train_batch(self, batch, batch_info):
        features, classes = batch
        for player, optimizer in zip(range(2), self.optimizers, strict=True):
            output = self.models[0](features)
            if player:
                output = self.models[1](output.detach())
            loss = nn.functional.cross_entropy(output, classes)
            loss.backward()
            if self.global_step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        return {"train_loss": loss.item()}


@pytest.mark.slow
def test_learning_rates_are_those_of_the_windows_first_batch():
    """What is copied when the first optimizer steps has seen a scheduler step since."""
    strikes = [Strike("kill", rank=1, step=3, phase="applied")]
    same_as_undisturbed(TwoPlayersByTwo, strikes, (6,))


class Paused(Classifier):
    """Gathers on each rank alone, and reduces with every second batch of the run."""

    def train_batch(self, batch, batch_info):
        features, classes = batch
        loss = self.criterion(self.model(features), classes)
        if self.global_step % 2 == 0:
            with self.no_sync():
                loss.backward()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss.item()}


@pytest.mark.slow
def test_what_only_the_dead_had_gathered_is_not_made_up():
    with trainer_of(Paused, spare_workers=1, scheduler_step_freq="batch") as trainer:
        trainer.train(num_steps=3)
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        with pytest.raises(LockstepError, match="checkpoint") as raised:
            trainer.train(num_steps=3)
    assert "had not been reduced" in "".join(raised.value.__notes__)


class ZeroesInItsLoss(Classifier):
    """A step begins in `compute_loss`: a worker that takes over a shard has gradients there."""

    def compute_loss(self, batch, batch_info):
        self.optimizer.zero_grad()
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_a_loss_that_zeroes_gradients_after_a_death_without_a_spare():
    found = []
    for operator_cls in (Classifier, ZeroesInItsLoss):
        strikes = [Strike("kill", rank=1, step=2, phase="backward")]
        with trainer_of(operator_cls, strikes) as trainer:
            trainer.train(num_steps=7)
            found.append(digest(trainer))
            assert len(trainer.status()["recoveries"]) == 1
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_loss_that_zeroes_gradients_on_workers_with_two_shards():
    found = []
    for operator_cls in (Classifier, ZeroesInItsLoss):
        with trainer_of(operator_cls, num_shards=4) as trainer:
            trainer.train(num_steps=5)
            found.append(digest(trainer))
    assert found[0] == found[1]


class TrainsItsHead(Classifier):
    """Layers that no optimizer holds have gradients, too; nothing in the program clears those."""

    def setup(self, config):
        self.model = _network()
        self.optimizer = torch.optim.Adam(self.model[-1].parameters(), lr=0.01)
        self.criterion = nn.CrossEntropyLoss()
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=DataLoader(_data(), config[BATCH_SIZE], shuffle=True))


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["in a step", "between calls"])
def test_gradients_that_no_optimizer_holds(dies):
    """A worker that joins has none of the steps before, and the survivors have none left."""
    found = []
    for is_struck in (False, True):
        in_step = is_struck and dies == "in a step"
        strikes = [Strike("kill", rank=1, step=2, phase="backward")] if in_step else []
        arguments = {"clip_grad_norm": 0.1, "spare_workers": 1, "scheduler_step_freq": None}
        with trainer_of(TrainsItsHead, strikes, **arguments) as trainer:
            trainer.train(num_steps=4)
            if is_struck and not in_step:
                os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
            trainer.train(num_steps=4)
            found.append(digest(trainer))
            assert len(trainer.status()["recoveries"]) == is_struck
    assert found[0] == found[1]
