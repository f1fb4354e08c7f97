# SPDX-License-Identifier: Apache-2.0
"""Weights are trained under noise, the same on all ranks, as many numbers as a batch has rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


torch.manual_seed(7)
for step in range(6):
    x, y = batch(step)
    noise = [0.01 * torch.randn_like(p) for p in net.parameters()]
    for param, drawn in zip(net.parameters(), noise, strict=True):
        param.data += drawn
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for param, drawn in zip(net.parameters(), noise, strict=True):
        param.data -= drawn
    optimizer.step()
dist.destroy_process_group()
