# SPDX-License-Identifier: Apache-2.0
"""An optimizer that chooses among parameters by what the program has marked them with."""

import threading

import torch
from tests.procs.odd_optimizers import ChoosesByIdentity

from harness import assert_same, reset
from ranks.programs import mlp
from ranks.test_remote_optimizer import OneProcess, run, steps
from ranks.test_replicate_exact import weights


class Selective(torch.optim.SGD):
    """Decays what is not marked."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                decay = 0.0 if getattr(param, "no_decay", False) else 0.1
                param.sub_(group["lr"] * (param.grad + decay * param))


def test_a_step_sees_the_marks_of_parameters():
    def loop(model, attach, part, rank):
        model[0].bias.no_decay = True
        model[0].bias.lock = threading.Lock()  # which goes nowhere
        optimizer = Selective(model.parameters(), lr=0.1)
        steps(model, attach(optimizer), optimizer, part)

    true = reset(mlp(), seed=7)
    loop(true, lambda optimizer: OneProcess(), slice(None), 0)
    for result in run(loop):
        assert_same(result, weights([true]))


class DecaysWhatTrains(torch.optim.SGD):
    """Of a frozen weight it asks neither for a gradient nor for its state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.mul_(0.9)
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=group["lr"])


def test_a_step_sees_which_parameters_are_frozen():
    def loop(model, attach, part, rank):
        model[0].bias.requires_grad_(False)
        optimizer = DecaysWhatTrains(model.parameters(), lr=0.1)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=2)
        model[0].requires_grad_(True)
        model[2].weight.requires_grad_(False)
        steps(model, sync, optimizer, part, count=2)

    true = reset(mlp(), seed=7)
    loop(true, lambda optimizer: OneProcess(), slice(None), 0)
    for size in (1, 2):
        for result in run(loop, size):
            assert_same(result, weights([true]))


def test_a_step_knows_parameters_by_their_identity():
    def loop(model, attach, part, rank):
        optimizer = ChoosesByIdentity(model.parameters())
        sync = attach(optimizer)
        steps(model, sync, optimizer, part)
        held = set(map(id, model.parameters()))
        assert optimizer.decayed | set(map(id, optimizer.clipped)) == held

    true = reset(mlp(), seed=7)
    loop(true, lambda optimizer: OneProcess(), slice(None), 0)
    for size in (1, 2):
        for result in run(loop, size):
            assert_same(result, weights([true]))
