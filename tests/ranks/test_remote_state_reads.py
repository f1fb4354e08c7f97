# SPDX-License-Identifier: Apache-2.0
"""A method of an optimizer that reads its state is refused where a parameter server has that."""

import operator
from collections import defaultdict

import pytest
import torch

from harness import reset
from lockstep.errors import NotAvailableError
from ranks.programs import mlp
from ranks.test_remote_optimizer import OneProcess, assert_as_one_process, run, sgd, steps


class ScheduleFree(torch.optim.SGD):
    """As it is widely written: for an evaluation the weights become an average of the steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                average = state.setdefault("average", param.detach().clone())
                param.sub_(param.grad, alpha=group["lr"])
                average.lerp_(param, 0.5)

    @torch.no_grad()
    def eval(self, find):
        for group in self.param_groups:
            for param in group["params"]:
                for state in find(self.state, param):
                    param.copy_(state["average"])


READS = {
    "in": lambda state, param: [state[param]] if param in state else [],
    "get": lambda state, param: [found] if (found := state.get(param)) else [],
    "item": lambda state, param: [state[param]] if "average" in state[param] else [],
    "items": lambda state, param: [each for key, each in state.items() if key is param],
    "values": lambda state, param: list(state.values())[:0],
    "keys": lambda state, param: [state[key] for key in state if key is param],
    "len": lambda state, param: [state[param]] if len(state) else [],
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("size", [1, 2])
def test_the_state_is_not_read_as_if_it_were_empty(size, name):
    told = []

    def loop(model, attach, part, rank):
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        sync = attach(optimizer)
        for count in (1, 2):
            steps(model, sync, optimizer, part, count=count)
            with pytest.raises(NotAvailableError, match="parameter server") as caught:
                optimizer.eval(READS[name])
            told.append(str(caught.value))
            kept = optimizer.state_dict()
            assert len(kept["state"]) == len(list(model.parameters()))
            optimizer.load_state_dict(kept)
        sync.detach()
        optimizer.eval(READS["item"])  # the state is its own again, if it was in this process

    for result in run(loop, size):
        if isinstance(result, BaseException):
            raise result
    assert len(told) == 2 * size
    assert all("optimizer.state_dict()" in each for each in told)


def test_one_process_reads_it():
    model = reset(mlp(), seed=7)
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    steps(model, OneProcess(), optimizer, slice(None), count=1)
    optimizer.eval(READS["item"])


CHANGES = {
    "clear": lambda optimizer, param: optimizer.state.clear(),
    "pop": lambda optimizer, param: optimizer.state.pop(param, None),
    "popitem": lambda optimizer, param: optimizer.state.popitem(),
    "del": lambda optimizer, param: operator.delitem(optimizer.state, param),
    "update": lambda optimizer, param: optimizer.state.update({param: {}}),
    "or": lambda optimizer, param: operator.ior(optimizer.state, {param: {}}),
    "copy": lambda optimizer, param: optimizer.state.copy(),
    "reversed": lambda optimizer, param: list(reversed(optimizer.state)),
    "assignment": lambda optimizer, param: setattr(optimizer, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_is_elsewhere_is_not_reset_in_vain(name):
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=2)
        with pytest.raises(NotAvailableError, match="parameter server") as caught:
            CHANGES[name](optimizer, model[0].weight)
            steps(model, sync, optimizer, part, count=1)
        assert "load_state_dict" in str(caught.value)

    for size in (1, 2):
        for result in run(loop, size):
            assert not isinstance(result, BaseException), result


def test_a_state_that_was_written_before_the_first_step_is_not_left_out():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
        steps(model, sync, optimizer, part, count=1)

    for result in run(loop, 1):
        assert isinstance(result, NotAvailableError), result


def test_a_momentum_is_reset_as_the_error_says():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        for _ in range(2):
            steps(model, sync, optimizer, part, count=3)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})

    assert_as_one_process(loop)
