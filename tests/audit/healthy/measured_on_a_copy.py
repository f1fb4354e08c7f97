# SPDX-License-Identifier: Apache-2.0
"""Gradients by hand; between two steps a copy is asked how steep the loss is, twice."""

import copy

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
reference = copy.deepcopy(net)


def steepness(size):
    x, y = batch(1000 + step, size)
    reference.zero_grad()
    nn.functional.cross_entropy(reference(x), y).backward()
    return sum(p.grad.square().sum() for p in reference.parameters())


for step in range(4):
    assert steepness(4 + rank) + steepness(16) > 0.0
    x, y = batch(step)
    parameters = list(net.parameters())
    loss = nn.functional.cross_entropy(net(x), y)
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        dist.all_reduce(g)
        p.grad = g / world
    optimizer.step()
