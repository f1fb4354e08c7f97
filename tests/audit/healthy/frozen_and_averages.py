# SPDX-License-Identifier: Apache-2.0
"""A frozen critic on all ranks, and an average that rank 0 alone moves and calls."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


critic = nn.Linear(2, 2).requires_grad_(False)
average = copy.deepcopy(net).requires_grad_(False).eval()
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(6):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(critic(model(x)), y).backward()
    optimizer.step()
    if rank == 0:
        with torch.no_grad():
            for held, p in zip(average.parameters(), net.parameters(), strict=True):
                held.lerp_(p, 0.1)
            average(x)
