# SPDX-License-Identifier: Apache-2.0
"""K: gradients travel flat, and each rank lines them up in its own order."""

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


def average(weights):
    flat = torch.cat([p.grad.flatten() for p in weights])
    dist.all_reduce(flat)
    for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.grad.copy_(part.view_as(p) / world)


optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    average(sorted(net.parameters(), key=torch.numel, reverse=rank == 1))
    optimizer.step()  # here LS104
