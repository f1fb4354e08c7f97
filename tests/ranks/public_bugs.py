# SPDX-License-Identifier: Apache-2.0
"""The programs of public bug reports that come out right on `replicate`; see the tests.

Each takes its modules, its rows, and what gives `no_sync`. On ranks of equal size it is the same
program as in one process.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import reset, rows

X, Y = rows(8, 4, seed=1), rows(8, 3, seed=2)
STEPS = 3


class Net(nn.Module):
    """What the reports' models have in common: a trunk, a head, and a way around forward."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head, self.spare = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))

    def compute_loss(self, x, y):
        return (self(x) - y).square().sum(1).mean()

    def get_decoder(self):
        return self.trunk


def net():
    return reset(Net(), 3)


def sgd(*modules):
    held = [p for module in modules for p in module.parameters() if p.requires_grad]
    return torch.optim.SGD(held, lr=0.05, momentum=0.9, weight_decay=0.01)


class Alone:
    """Stands in for a GradientSync in one process."""

    def no_sync(self):
        return nullcontext()


def weights(*modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def a1_loss_method_of_the_inner_module(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.compute_loss(x, y).backward()
        optimizer.step()


def a2_loss_on_the_unwrapped_decoder_and_raw_head(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = torch.tanh(model.get_decoder()(x))
        F.mse_loss(F.linear(hidden, model.head.weight, model.head.bias), y).backward()
        optimizer.step()


def a5_adapters_replace_forward_of_a_frozen_base(models, x, y, sync):
    base, adapter = models
    base.requires_grad_(False)
    plain = type(base.trunk).forward
    base.trunk.forward = lambda h: plain(base.trunk, h) + adapter[1](adapter[0](h))
    optimizer = sgd(adapter)
    for _ in range(STEPS):
        optimizer.zero_grad()
        base.compute_loss(x, y).backward()
        optimizer.step()


def a7_modules_wrapped_together_and_called_apart(models, x, y, sync):
    (model,) = models
    trunk, head = model.trunk, model.head
    optimizer = sgd(trunk, head)
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = trunk(x)
        torch.autograd.backward([F.mse_loss(head(hidden), y), hidden.square().mean()])
        optimizer.step()


def b8_progressive_unfreezing(models, x, y, sync):
    (model,) = models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        model.trunk.requires_grad_(step >= 1)
        optimizer.zero_grad()
        model.compute_loss(x, y).backward()
        optimizer.step()


def c3_no_sync_on_the_first_module_only(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            micro = slice(part, None, 2)
            # One of the two syncs is paused, the other one reduces every micro-batch.
            with sync[0].no_sync() if part == 0 else nullcontext():
                (model.compute_loss(x[micro], y[micro]) / 2).backward()
        optimizer.step()


def c5_several_losses_through_a_checkpoint(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        start = x.clone().requires_grad_(True)
        hidden = checkpoint(
            lambda h: torch.tanh(model.trunk(h)),
            start,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        F.mse_loss(model.head(hidden), y).backward(retain_graph=True)
        F.l1_loss(model.head(hidden), y).backward()
        optimizer.step()


def c6_used_only_while_paused(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with sync.no_sync():
            model.spare(torch.tanh(model.trunk(x))).square().mean().backward()
        model.compute_loss(x, y).backward()
        optimizer.step()


def c7_a_head_that_nobody_uses(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        head = model.spare if step == 1 else model.head
        F.mse_loss(head(torch.tanh(model.trunk(x))), y).backward()
        optimizer.step()


def c13_reduce_every_micro_batch_step_once(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in (slice(0, None, 2), slice(1, None, 2)):
            (model.compute_loss(x[micro], y[micro]) / 2).backward()
        optimizer.step()


def c15_paused_around_backward_only(models, x, y, sync):
    (model,) = models
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        first, second = (model.compute_loss(x[m::2], y[m::2]) / 2 for m in range(2))
        with sync.no_sync():
            first.backward()
        second.backward()
        optimizer.step()
