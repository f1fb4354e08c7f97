# SPDX-License-Identifier: Apache-2.0
"""Whoever steps the registered parameters is seen: an optimizer within another one, once a step."""

import pytest
import torch
from tests.ray.surviving import SAM
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    STEPS_PER_EPOCH,
    Regression,
    linear,
    loader,
    problem,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep import Callback
from lockstep.errors import NonFiniteError
from lockstep.trainer.logged_run import LoggedRun


def sam(model):
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


class Lookahead(torch.optim.Optimizer):
    """Every second step of the optimizer within it goes half of the way."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.num_steps = inner, 0
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        for p in held:
            self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        self.num_steps += 1
        for p in held if self.num_steps % 2 == 0 else []:
            p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Seen(Regression):
    """A loop of its own, or the default one, with all that follows a step."""

    def setup(self, config):
        self.model, self.criterion, self.num_after = linear(), nn.MSELoss(), 0
        self.optimizer = self.made()
        self.ema = self.register(
            models=self.model, optimizers=self.optimizer, criterion=self.criterion, ema=0.5
        )[-1]
        self.register_data(train_loader=loader())

    def after_step(self):
        self.num_after += 1


class Sharp(Seen):
    def made(self):
        return sam(self.model)

    def train_batch(self, batch, batch_info):
        features, targets = batch
        for step in (self.optimizer.first_step, self.optimizer.second_step):
            loss = self.criterion(self.model(features), targets)
            loss.backward()
            step()
        return {"train_loss": loss.item()}


class Ahead(Seen):
    def made(self):
        return Lookahead(sgd(self.model))


class CallsItsBase(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Derived(Seen):
    def made(self):
        # The first plain one of a process lets torch call hooks in the step of the base as well.
        return CallsItsBase(sgd(self.model).param_groups)


def by_hand(operator, steps):
    """The weights of plain autograd after `steps`, and torch's average of them."""
    features, targets = problem()
    model = linear()
    made = {Sharp: sam, Ahead: lambda model: Lookahead(sgd(model)), Derived: sgd}
    optimizer = made[operator](model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    names = ("first_step", "second_step") if operator is Sharp else ("step",)
    for number in range(steps):
        start = number % STEPS_PER_EPOCH * BATCH
        rows = slice(start, min(start + BATCH, SAMPLES))
        for name in names:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
            getattr(optimizer, name)()
        average.update_parameters(model)
    return weights(model), weights(average.module)


class Told(Callback):
    every = 1

    def __init__(self):
        self.steps = []

    def on_step(self, trainer, step, metrics):
        self.steps.append(step)


@pytest.mark.parametrize("operator", [Sharp, Ahead, Derived])
def test_each_step_is_followed_once_by_all_that_follows_a_step(operator, tmp_path):
    told = Told()
    arguments = {"callbacks": [told], "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with trainer(operator, **arguments) as one:
        one.train(num_steps=2)  # of the checkpoints that are due in a call the last is sure
        one.train()
        one.train(num_steps=1)
        expected, average = by_hand(operator, 5)
        assert same(weights(one.get_model()), expected)
        assert same(weights(one.get_averaged_model()), average)
        assert one.get_local_operator().num_after == 5
    assert told.steps == [1, 2, 3, 4, 5]
    assert (tmp_path / "step-0000000002.ckpt").exists()
    steps = LoggedRun.read(tmp_path).steps
    assert [steps[number].line["lr"] for number in range(1, 6)] == [[0.1]] * 5


@pytest.mark.parametrize("operator", [Sharp, Ahead])
def test_the_state_of_an_optimizer_within_another_one_is_in_the_runs(operator, tmp_path):
    with trainer(operator) as one:
        one.train(num_steps=4)
        path = one.save(tmp_path / "run.pt")
    with trainer(operator) as other:
        other.load(path)
        optimizer = other.get_local_operator().optimizer
        inner = optimizer.base_optimizer if operator is Sharp else optimizer.inner
        assert inner.param_groups is optimizer.param_groups
        other.train(num_steps=4)
        assert same(weights(other.get_model()), by_hand(operator, 8)[0])


def test_a_step_within_another_one_is_compared_and_checked():
    class Diverges(Sharp):
        def train_batch(self, batch, batch_info):
            if batch_info["global_step"] == 2:
                batch = (batch[0] * torch.inf, batch[1])
            return super().train_batch(batch, batch_info)

    with trainer(Sharp) as one:
        assert one.verify().ok
    with trainer(Diverges) as one:
        with pytest.raises(NonFiniteError, match="was not taken"):
            one.train()
        assert same(weights(one.get_model()), by_hand(Sharp, 2)[0])


class FailsOnce(torch.optim.SGD):
    """Runs out of memory in its third step."""

    def step(self, closure=None):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        if self.num_calls == 3:
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("made", [FailsOnce, lambda groups: Lookahead(FailsOnce(groups))])
def test_a_step_that_is_called_again_after_it_has_failed_is_followed_by_all(made):
    class TriesAgain(Seen):
        def made(self):
            return made(sgd(self.model).param_groups)

        def train_batch(self, batch, batch_info):
            features, targets = batch
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), targets)
            loss.backward()
            try:
                self.optimizer.step()
            except MemoryError:
                self.optimizer.step()
            return {"train_loss": loss.item()}

    operator_cls = Derived if made is FailsOnce else Ahead
    with trainer(TriesAgain) as one:
        one.train()
        expected, average = by_hand(operator_cls, STEPS_PER_EPOCH)
        assert same(weights(one.get_model()), expected)
        assert same(weights(one.get_averaged_model()), average)
        assert one.get_local_operator().num_after == STEPS_PER_EPOCH


def test_an_optimizer_that_nobody_registered_is_seen():
    class Besides(Seen):
        def made(self):
            self.besides = sgd(self.model)
            return sgd(self.model)

        def train_batch(self, batch, batch_info):
            features, targets = batch
            for optimizer in (self.optimizer, self.besides):
                optimizer.zero_grad()
                loss = self.criterion(self.model(features), targets)
                loss.backward()
                optimizer.step()
            return {"train_loss": loss.item()}

    with trainer(Besides) as one:
        one.train(num_steps=3)
        operator = one.get_local_operator()
        assert operator.num_after == 6
        hooked = operator.besides._optimizer_step_post_hooks
        assert hooked
    assert not hooked


class HoldsOneBack(Regression):
    """A second optimizer of the same weights, which it does not register."""

    def setup(self, config):
        super().setup(config)
        self.second = config["second"](self.model.parameters(), lr=0.01)

    def train_batch(self, batch, batch_info):
        features, target = batch
        loss = self.criterion(self.model(features), target)
        loss.backward()
        self.optimizer.step(), self.second.step()
        self.optimizer.zero_grad()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize("second", [torch.optim.Adam, torch.optim.SGD])
def test_a_state_that_no_checkpoint_will_hold_is_said_once(second, caplog):
    with trainer(HoldsOneBack, config={"second": second}) as run:
        run.train()
    said = [each.getMessage() for each in caplog.records if each.name == "lockstep"]
    assert len(said) == (second is torch.optim.Adam)
    assert all("Adam steps registered parameters and is not registered" in each for each in said)


class SavesItsOwn(Lookahead):
    def state_dict(self):
        return {**super().state_dict(), "num_steps": self.num_steps}


class StepsAhead(Ahead):
    def made(self):
        return self.config["kind"](sgd(self.model))


@pytest.mark.parametrize("kind", [Lookahead, SavesItsOwn])
def test_attributes_that_no_checkpoint_will_hold_are_said_once(kind, caplog):
    with trainer(StepsAhead, config={"kind": kind}) as run:
        run.train()
    said = [each.getMessage() for each in caplog.records if each.name == "lockstep"]
    assert len(said) == (kind is Lookahead)
    assert all("Lookahead has changed its attributes `num_steps`, which" in each for each in said)
