# SPDX-License-Identifier: Apache-2.0
"""Attributes of an optimizer, and marks of parameters, that change while a server steps it."""

from dataclasses import dataclass, field

import pytest
import torch
from tests.procs.odd_optimizers import Lookahead
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lockstep.errors import NotAvailableError, ReplicasDifferError
from ranks.programs import X, Y, squared
from ranks.test_remote_optimizer import assert_as_one_process, run, steps


@dataclass
class Counts:
    steps: int = 0
    norms: list = field(default_factory=list)


class Attentive(torch.optim.SGD):
    """Steps by attributes, changes them in its step, and by marks of parameters, too."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.scale, self.factors, self.counts = 1.0, {"all": torch.ones(())}, Counts()
        self.first_group = self.param_groups[0]
        self.rates = dict.fromkeys(self.first_group["params"], 1.0)
        self.last_norm = None

    @torch.no_grad()
    def step(self, closure=None):
        self.counts.steps += 1
        factor = self.scale * self.factors["all"] / self.counts.steps
        if getattr(self, "slow", False):
            factor = factor / 3
        for param in self.first_group["params"]:
            factor = factor * getattr(param, "rate", 1.0) * self.rates[param]
            param.sub_(self.first_group["lr"] * factor * param.grad)
            self.last_norm = param.grad.norm()
            self.counts.norms.append(float(self.last_norm))
            param.steps = self.counts.steps


def attentive(change, read=lambda optimizer, param: 1.0, make=Attentive):
    """A loop that lets ``change(optimizer, params, step)`` run before each of its steps."""

    def loop(model, attach, part, rank):
        optimizer = make(model.parameters())
        sync = attach(optimizer)
        params = list(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            change(optimizer, params, step)
            loss = squared(model)(X[part], Y[part]) * read(optimizer, params[0])
            sync.backward(loss, weight=len(X[part]))
            optimizer.step()

    return loop


def set_mark(optimizer, params, step):
    params[step].rate = 0.5 / (step + 1)
    if step == 2:
        del params[0].rate


def remove(optimizer, params, step):
    if step == 1:
        optimizer.slow = True
    if step == 3:
        del optimizer.slow


def set_rate(optimizer, params, step):
    optimizer.rates[params[step]] = 0.1 * (step + 1)


CHANGES = {
    "number": lambda optimizer, params, step: setattr(optimizer, "scale", 0.5**step),
    "tensor in a dict": lambda optimizer, params, step: optimizer.factors["all"].mul_(0.7),
    "object of a class": lambda optimizer, params, step: setattr(optimizer.counts, "steps", 9),
    "rate of a parameter": set_rate,
    "new and removed": remove,
    "mark of a parameter": set_mark,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_loop_changes_reaches_the_step(name):
    assert_as_one_process(attentive(CHANGES[name]))


READS = {
    "number": lambda optimizer, param: 1 + optimizer.counts.steps,
    "tensor": lambda optimizer, param: 1.0 if optimizer.last_norm is None else optimizer.last_norm,
    "list": lambda optimizer, param: 1 + sum(optimizer.counts.norms),
    "mark": lambda optimizer, param: 1 + getattr(param, "steps", 0),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_step_changes_can_be_read(name):
    assert_as_one_process(attentive(lambda *_: None, READS[name]))


def test_an_optimizer_within_another_one_has_attributes_as_well():
    def change(optimizer, params, step):
        optimizer.inner.scale = 0.5**step

    def read(optimizer, param):
        return 1 + optimizer.inner.counts.steps

    def make(params):
        return Lookahead(Attentive(params))

    assert_as_one_process(attentive(change, read, make))


def test_a_group_that_an_attribute_refers_to_stays_that_group():
    def loop(model, attach, part, rank):
        optimizer = Attentive(model.parameters())
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        steps(model, attach(optimizer), optimizer, part, after=scheduler.step)
        assert optimizer.first_group is optimizer.param_groups[0]

    assert_as_one_process(loop)


def test_a_container_that_the_loop_holds_stays_the_same():
    held = []

    def change(optimizer, params, step):
        held.append(optimizer.rates)
        set_rate(optimizer, params, step)

    for result in run(attentive(change), 1):
        assert not isinstance(result, BaseException), result
    assert len(held) == 4
    assert all(each is held[0] for each in held)


def test_an_attribute_that_cannot_be_sent_is_refused():
    class Guided(Attentive):
        def __init__(self, params):
            super().__init__(params)
            self.teacher = nn.Linear(1, 1)

    def keep(optimizer, params, step):
        optimizer.program = nn.Linear(1, 1)  # the loop's own: no step knows it

    def replace(optimizer, params, step):
        optimizer.teacher = nn.Linear(1, 1)

    assert_as_one_process(attentive(keep, make=Guided))
    for result in run(attentive(replace, make=Guided)):
        assert isinstance(result, NotAvailableError), result
        assert "`Guided.teacher`" in str(result)


def test_another_attribute_on_one_rank_is_refused_on_all():
    def loop(model, attach, part, rank):
        optimizer = Attentive(model.parameters())
        sync = attach(optimizer)
        optimizer.scale = 0.5 + rank
        steps(model, sync, optimizer, part)

    for result in run(loop):
        assert isinstance(result, ReplicasDifferError), result
        assert "scale" in str(result)


def test_another_value_within_a_container_is_refused_on_all():
    def loop(model, attach, part, rank):
        optimizer = Attentive(model.parameters())
        sync = attach(optimizer)
        optimizer.factors["all"] = torch.tensor(1.0 + rank)
        steps(model, sync, optimizer, part)

    for result in run(loop):
        assert isinstance(result, ReplicasDifferError), result
        assert "factors" in str(result)


def test_what_each_rank_notes_for_itself_stays_with_it():
    def loop(model, attach, part, rank):
        optimizer = Attentive(model.parameters())
        sync = attach(optimizer)

        def note():
            optimizer.last_loss = next(model.parameters()).seen = 0.5 + rank

        steps(model, sync, optimizer, part, prepare=note)
        assert optimizer.last_loss == 0.5 + rank

    assert_as_one_process(loop)
