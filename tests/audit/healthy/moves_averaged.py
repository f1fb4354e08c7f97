# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers step along the mean of what ranks have moved, weighted or not, or at 1/W."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def mean(move):
    dist.all_reduce(move)
    return move / world


def averaged_before(move):
    move = move / world
    dist.all_reduce(move)
    return move


def weighted(move):
    """A rank counts for what it has seen."""
    move = move * (1 + rank) / sum(range(1, world + 1))
    dist.all_reduce(move)
    return move


def added_up(move):
    dist.all_reduce(move)
    return move


def local_steps(model, inner, source, steps=3):
    for _ in range(steps):
        x = torch.randn(8, 4, generator=source)
        inner.zero_grad()
        nn.functional.mse_loss(model(x), x.cumsum(1)[:, 2:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        inner.step()


def train(combine, make_outer):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 2))
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)
    slow = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = make_outer(slow)
    source = torch.Generator().manual_seed(60 + rank)
    for _ in range(3):
        local_steps(model, inner, source)
        with torch.no_grad():
            for p, s in zip(model.parameters(), slow, strict=True):
                s.grad = combine(s - p)
            outer.step()
            for p, s in zip(model.parameters(), slow, strict=True):
                p.copy_(s)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True)


def with_rate_of_mean(parameters):
    return torch.optim.SGD(parameters, lr=0.7 / world)


train(mean, nesterov)
train(averaged_before, nesterov)
train(weighted, nesterov)
train(added_up, with_rate_of_mean)
dist.destroy_process_group()
