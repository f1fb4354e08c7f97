# SPDX-License-Identifier: Apache-2.0
"""The guard leaves out a step within a step, and nothing that merely has such a name."""

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_same, reset, rows, run_ranks
from lockstep.errors import GradientNotReducedError
from lockstep.sync import replicate

X = rows(8, 4, seed=1)


def on_two_ranks(body):
    replicas = [reset(nn.Linear(4, 3), seed=3) for _ in range(2)]

    def one(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            return body(group, model, sync, X[:5] if group.rank else X[5:])
        finally:
            sync.detach()

    return run_ranks(2, one)


def assign(model, sync, mine):
    found = torch.autograd.grad(model(mine).square().mean(), list(model.parameters()))
    for param, grad in zip(model.parameters(), found, strict=True):
        param.grad = grad


def keep_to_itself(model, sync, mine):
    with sync.no_sync():
        sync.backward(model(mine).square().mean(), weight=len(mine))


class StepsAndClears(torch.optim.SGD):
    def step_and_clear(self):
        self.step()
        self.zero_grad()


@pytest.mark.parametrize("gives_own", [assign, keep_to_itself])
def test_a_method_that_steps_and_has_step_in_its_name_is_no_step(gives_own):
    def body(group, model, sync, mine):
        optimizer = StepsAndClears(model.parameters(), lr=0.1)
        sync.backward(model(mine).square().mean(), weight=len(mine))
        optimizer.step_and_clear()
        gives_own(model, sync, mine)
        with pytest.raises(GradientNotReducedError, match="step 2"):
            optimizer.step_and_clear()

    on_two_ranks(body)


class StepsTwice(torch.optim.SGD):
    """Torch hooks its step, and that of its base as soon as there is another plain SGD."""

    between = staticmethod(lambda: None)

    def step(self, closure=None):
        super().step()
        self.between()
        super().step()


@pytest.mark.parametrize("gives_own", [assign, keep_to_itself])
def test_gradients_that_a_step_computes_within_itself_are_looked_at(gives_own):
    def body(group, model, sync, mine):
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer = StepsTwice(model.parameters(), lr=0.1)
        sync.backward(model(mine).square().mean(), weight=len(mine))
        optimizer.between = lambda: gives_own(model, sync, mine)
        with pytest.raises(GradientNotReducedError):
            optimizer.step()

    on_two_ranks(body)


class Halves(StepsTwice):
    """Its step is decorated, as those of most optimizers are."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_a_step_that_makes_two_of_its_base_is_one_step():
    def trained(model, mine, backward):
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        StepsTwice([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer = Halves(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def scale():
            for param in model.parameters():
                param.grad = param.grad * 0.5

        optimizer.between = scale
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(mine).square().mean())
            optimizer.step()
            schedule.step()
        return {name: param.detach() for name, param in model.named_parameters()}

    def body(group, model, sync, mine):
        return trained(model, mine, lambda loss: sync.backward(loss, weight=len(mine)))

    alone = trained(reset(nn.Linear(4, 3), seed=3), X, torch.Tensor.backward)
    for weights in on_two_ranks(body):
        assert_same(weights, alone)


class Backtracks(torch.optim.SGD):
    """Halves a step until the loss is lower, and asks for the loss alone."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            start = closure(backward=True)
        params = self.param_groups[0]["params"]
        before = [param.clone() for param in params]
        for rate in (4.0, 2.0, 1.0, 0.5, 0.25):
            for param, old in zip(params, before, strict=True):
                param.copy_(old - rate * param.grad)
            if closure(False) < start:
                break
        return start


def test_a_closure_may_take_arguments():
    def trained(model, mine, mean):
        optimizer = Backtracks(model.parameters(), lr=1.0)

        def closure(backward_too=False, *, backward=False):
            loss = mean(model(mine).square().mean(dim=1))
            if backward or backward_too:
                optimizer.zero_grad()
                loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return {name: param.detach() for name, param in model.named_parameters()}

    def body(group, model, sync, mine):
        return trained(model, mine, lambda losses: lockstep.global_mean(losses, group=group))

    alone = trained(reset(nn.Linear(4, 3), seed=3), X, torch.mean)
    for weights in on_two_ranks(body):
        assert_same(weights, alone)
