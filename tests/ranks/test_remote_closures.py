# SPDX-License-Identifier: Apache-2.0
"""Closures of steps at a parameter server: evaluated before the step, or refused."""

import pytest
import torch

from lockstep.errors import NotAvailableError
from ranks.programs import X, Y, squared
from ranks.test_remote_optimizer import assert_as_one_process, run


class EvaluatesAgain(torch.optim.SGD):
    """SAM as a step with an optional closure; without one it is plain SGD."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=group["lr"])
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step()


def closure_of(model, sync, optimizer, part):
    def closure():
        optimizer.zero_grad()
        loss = squared(model)(X[part], Y[part])
        sync.backward(loss, weight=len(X[part]))
        return loss

    return closure


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_of_ones_own_gets_no_closure(size):
    def loop(model, attach, part, rank):
        optimizer = EvaluatesAgain(model.parameters(), lr=0.05)
        closure = closure_of(model, attach(optimizer), optimizer, part)
        closure()
        optimizer.step(closure)

    for result in run(loop, size):
        assert isinstance(result, NotAvailableError), result
        assert "EvaluatesAgain" in str(result)
        assert "optimizer.step()" in str(result)


def test_a_step_that_is_inherited_from_torch_does():
    class Inherits(torch.optim.Adam):
        """Has no step of its own."""

    def loop(model, attach, part, rank):
        optimizer = Inherits(model.parameters(), lr=0.01)
        closure = closure_of(model, attach(optimizer), optimizer, part)
        for _ in range(3):
            assert optimizer.step(closure).item() > 0

    assert_as_one_process(loop)
