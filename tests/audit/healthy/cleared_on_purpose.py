# SPDX-License-Identifier: Apache-2.0
"""Sharpness-aware minimisation: the first gradient shows where to go, and is cleared."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(6):
    x, y = batch(step)
    moves = None
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if moves is None:
            moves = [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
            with torch.no_grad():
                for p, move in zip(net.parameters(), moves, strict=True):
                    p.add_(move)
    with torch.no_grad():
        for p, move in zip(net.parameters(), moves, strict=True):
            p.sub_(move)
    optimizer.step()
dist.destroy_process_group()
