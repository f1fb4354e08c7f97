# SPDX-License-Identifier: Apache-2.0
"""A centre of the teacher's outputs, averaged over ranks, without gradient."""

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


teacher = copy.deepcopy(net).requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
centre = torch.zeros(2)
for step in range(4):
    x, _ = batch(step)
    with torch.no_grad():
        targets = teacher(x)
    loss = (
        -(torch.softmax((targets - centre) / 0.5, 1) * torch.log_softmax(model(x), 1)).sum(1).mean()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        mean = targets.mean(0)
        dist.all_reduce(mean)
        centre = 0.9 * centre + 0.1 * mean / world
        for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
