# SPDX-License-Identifier: Apache-2.0
"""Gradients are averaged in memory that was another gradient's in the step before, on one rank."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
parameters = list(net.parameters())
memory = torch.zeros(3, 32)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


optimizer = torch.optim.SGD(parameters, lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), parameters)
    for place, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        home = memory[2 - place if rank == 1 and step % 2 else place]
        p.grad = home[: p.numel()].view_as(p).copy_(gradient)
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
