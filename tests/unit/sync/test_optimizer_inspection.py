# SPDX-License-Identifier: Apache-2.0
"""Loaded states have all the bits that were saved, and a running step is told from other calls."""

import copy
import functools

import pytest
import torch

from lockstep.compiler_disable import disable_dynamo
from lockstep.sync.optimizer_inspection import (
    evaluates_closure_first,
    is_step_running,
    load_state,
)


class WithMasters(torch.optim.SGD):
    """Steps a float32 copy of each weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            master = self.state[param].setdefault("master", param.detach().float())
            master.add_(param.grad.float(), alpha=-1e-4)
            param.copy_(master)


def stepped(dtype=torch.bfloat16):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 7).to(dtype))
    optimizer = WithMasters([weight], lr=1e-4)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight, optimizer


def test_a_state_keeps_the_dtype_that_it_has():
    weight, optimizer = stepped()
    before = copy.deepcopy(optimizer.state[weight]["master"])
    load_state(optimizer, copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[weight]["master"].dtype is torch.float32
    assert torch.equal(optimizer.state[weight]["master"], before)


def test_a_state_of_weights_of_another_dtype_gets_theirs_as_torch_has_it():
    _, optimizer = stepped(torch.float32)
    weight, other = stepped()
    load_state(other, copy.deepcopy(optimizer.state_dict()), of_same_weights=False)
    assert other.state[weight]["master"].dtype is torch.bfloat16


OF_TORCH = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
]


@pytest.mark.parametrize("kind", sorted(set(OF_TORCH) - {torch.optim.Optimizer}, key=str))
def test_torchs_own_optimizers_evaluate_a_closure_first_and_once(kind):
    """All but LBFGS; a version of torch with another one would fail here."""

    def after_a_step(give):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3))
        optimizer = kind([weight])
        begin, calls = weight.detach().clone(), []

        def closure():
            calls.append(torch.equal(weight, begin))
            gradient = torch.cos(weight.detach())
            weight.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
            return gradient.sum()

        give(optimizer, closure)
        return weight.detach(), calls, evaluates_closure_first(optimizer)

    within, calls, is_known = after_a_step(lambda optimizer, closure: optimizer.step(closure))
    assert is_known == (kind is not torch.optim.LBFGS)
    if is_known:
        before, *_ = after_a_step(lambda optimizer, closure: (closure(), optimizer.step()))
        assert calls == [True]
        assert torch.equal(within, before)


class Tells(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        self.tell()
        torch._dynamo.graph_break()
        self.tell()

    @disable_dynamo
    def tell(self):
        self.told = [*getattr(self, "told", []), is_step_running((self,))]

    def tell_before_step(self):
        self.tell()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_runs_in_its_function_alone(compiled):
    optimizer = Tells([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before = optimizer.register_step_pre_hook(lambda *_: optimizer.tell())
    optimizer.tell_before_step()
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    step()
    before.remove()
    assert optimizer.told == [False, False, True, True]


def test_a_step_that_was_wrapped_once_more_is_running(monkeypatch):
    class Timed(Tells):
        def step(self, closure=None):
            self.tell()

    optimizer = Timed([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # torch hooks its class
    hooked = Timed.step
    monkeypatch.setattr(Timed, "step", functools.wraps(hooked)(lambda *args: hooked(*args)))
    optimizer.step()
    assert optimizer.told == [True]
