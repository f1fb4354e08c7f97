# SPDX-License-Identifier: Apache-2.0
"""A method of an optimizer that reads its state is refused where a parameter server has that."""

import pytest
import torch

from harness import reset
from lockstep.errors import NotAvailableError
from ranks.programs import mlp
from ranks.test_remote_optimizer import OneProcess, run, steps


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
