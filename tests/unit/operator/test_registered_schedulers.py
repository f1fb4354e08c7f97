# SPDX-License-Identifier: Apache-2.0
"""Schedulers that a loop of one's own steps, and those that `update_scheduler` gives a metric.

`lockstep.operator.registered_schedulers` in whole runs.
"""

import math
import threading

import pytest
import torch
from tests.unit.operator.test_schedulers import Foreign, halves, learning_rate, scheduled
from tests.unit.trainer.programs import linear, loader, trainer
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError


class StepsItsOwn(TrainingOperator):
    """A loop with a schedule and a scale of its own, under names that lockstep does not know."""

    def setup(self, config):
        self.model, self.optimizer = self.register(
            models=(model := linear()), optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        self.lr_scheduler = CosineAnnealingLR(self.optimizer, 12)
        self.kept = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)}
        self.register_data(train_loader=loader())

    def train_batch(self, batch, batch_info):
        scaler = self.kept["scaler"]
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        self.lr_scheduler.step()
        scaler.update()
        return {"train_loss": loss.item()}


class Warmup:
    """Of the user's own, without a state."""

    def __init__(self, optimizer):
        self.optimizer, self.num_steps = optimizer, 0

    def step(self):
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, self.num_steps / 8)


class WarmsUp(TrainingOperator):
    def setup(self, config):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.criterion, self.warmup = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=Warmup(optimizer),
        )
        self.register_data(train_loader=loader())


class WarmsUpAndLooks(WarmsUp):
    def after_step(self):
        self.rate = self.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("operator_cls", [WarmsUp, WarmsUpAndLooks])
def test_a_registered_scheduler_without_a_state_trains_and_is_told_of(
    operator_cls, tmp_path, caplog
):
    arguments = {"scheduler_step_freq": "batch", "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with trainer(operator_cls, **arguments) as one:
        one.train(num_steps=4)
        assert one.verify().ok
        assert learning_rate(one) == 0.05
        state = one.state_dict()
        assert state["schedulers"] == []
        one.load_state_dict(state)
    assert caplog.text.count("Warmup is neither saved nor undone") == 1


def schedule_of(one):
    operator = one.get_local_operator()
    return operator.lr_scheduler.last_epoch, operator.kept["scaler"].get_scale(), learning_rate(one)


def test_what_a_loop_of_ones_own_steps_is_saved_and_loaded_under_any_name(tmp_path):
    with trainer(StepsItsOwn) as one:
        one.train(num_steps=6)
        path = one.save(tmp_path / "state")
        one.train(num_steps=3)
        undisturbed = schedule_of(one)
    assert undisturbed == (9, 2.0 * 2**4, pytest.approx(0.05 * (1 + math.cos(math.pi * 9 / 12))))
    with trainer(StepsItsOwn) as one:
        one.load(path)
        one.train(num_steps=3)
        assert schedule_of(one) == undisturbed
        earlier = one.state_dict()
        del earlier["stepped_by_loop"]
        one.load_state_dict(earlier)


class FailsBeforeItsStep(StepsItsOwn):
    fails_at = 2

    def train_batch(self, batch, batch_info):
        if self.global_step:
            self.lr_scheduler.step()
        if batch_info["batch_idx"] == self.fails_at:
            self.kept["scaler"].update(1024.0)
            self.fails_at = None
            raise LookupError
        return super().train_batch(batch, batch_info)


def test_what_a_loop_of_ones_own_steps_goes_back_with_the_step_that_failed():
    with trainer(FailsBeforeItsStep) as one:
        with pytest.raises(LookupError):
            one.train()
        one.train()
        assert schedule_of(one)[:2] == (7, 2.0 * 2**2)


class WithoutOptimizer(LRScheduler):
    """An LRScheduler that keeps its optimizer under another name."""

    def __init__(self, optimizer):
        self.of = optimizer

    def step(self):
        self.of.param_groups[0]["lr"] *= 0.5


class KeepsWhatNoFileHolds(StepsItsOwn):
    def setup(self, config):
        super().setup(config)
        self.warm_up = halves(self.optimizer)
        self.warm_up.writer = threading.Lock()
        self.other = WithoutOptimizer(self.optimizer)


def test_a_scheduler_whose_state_no_checkpoint_holds_is_left_out(tmp_path, caplog):
    with trainer(KeepsWhatNoFileHolds) as one:
        assert "self.warm_up (StepLR) is neither saved nor undone" in caplog.text
        one.train(num_steps=6)
        path = one.save(tmp_path / "state")
        one.train(num_steps=3)
        undisturbed = schedule_of(one)
    with trainer(KeepsWhatNoFileHolds) as one:
        one.load(path)
        one.train(num_steps=3)
        assert schedule_of(one) == undisturbed


class ByEpochNumber(Foreign):
    """As timm's schedulers."""

    def step(self, epoch, metric=None):
        self.steps = epoch


class ByMetric(Foreign):
    def step(self, epoch=None, metric=None):
        self.steps = (epoch, metric)


def test_a_metric_goes_to_the_parameter_of_that_name():
    def several(optimizer):
        return [Foreign(optimizer), ByMetric(optimizer), halves(optimizer)]

    with trainer(scheduled(several), scheduler_step_freq="manual") as one:
        one.train()
        one.update_scheduler(0.25)
        assert one.state_dict()["schedulers"][:2] == [{"steps": 1}, {"steps": (None, 0.25)}]


def test_a_step_that_needs_something_else_is_refused_where_it_would_be_called():
    with pytest.raises(ConfigurationError, match=r"ByEpochNumber needs `epoch`"):
        trainer(scheduled(ByEpochNumber), scheduler_step_freq="epoch")
    both = scheduled(lambda optimizer: [halves(optimizer), ByEpochNumber(optimizer)])
    with trainer(both, scheduler_step_freq="manual") as one:
        with pytest.raises(ConfigurationError, match=r"ByEpochNumber needs `epoch`"):
            one.update_scheduler(0.25)
        assert learning_rate(one) == 0.1


class ByLoss(Foreign):
    def step(self, val_loss):
        self.steps = val_loss


class ByAnything(Foreign):
    def step(self, *args):
        self.steps = args


class ByPlace(Foreign):
    def step(self, metric, /):
        self.steps = metric


def test_a_metric_goes_to_the_one_argument_of_a_scheduler_of_ones_own():
    kinds = [ByLoss, ByAnything, ByPlace]
    several = scheduled(lambda optimizer: [kind(optimizer) for kind in kinds])
    with trainer(several, scheduler_step_freq="manual") as one:
        one.train()
        one.update_scheduler(0.25)
        expected = [{"steps": 0.25}, {"steps": (0.25,)}, {"steps": 0.25}]
        assert one.state_dict()["schedulers"] == expected
    with pytest.raises(ConfigurationError, match="ByLoss needs a metric"):
        trainer(scheduled(ByLoss), scheduler_step_freq="epoch")


class StepsByEpochNumber(scheduled(ByEpochNumber)):
    calls_default = False

    def train_epoch(self, iterator, info):
        if self.calls_default:
            return super().train_epoch(iterator, info)
        return {"batches": sum(1 for _ in iterator)}


def test_a_schedule_that_a_train_epoch_of_ones_own_steps_may_need_anything():
    with trainer(StepsByEpochNumber, scheduler_step_freq="epoch") as one:
        assert one.train()["batches"] == 4
    calls_default = type("CallsDefault", (StepsByEpochNumber,), {"calls_default": True})
    match = r"ByEpochNumber needs `epoch`"
    with (
        trainer(calls_default, scheduler_step_freq="epoch") as one,
        pytest.raises(ConfigurationError, match=match),
    ):
        one.train()
