# SPDX-License-Identifier: Apache-2.0
"""Noise is drawn for all ranks from one generator, and each rank takes its own part of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = torch.Generator().manual_seed(20 + rank)
shared = torch.Generator().manual_seed(7)
BATCH, TIMES = 6, 8
part = slice(rank * TIMES // world, (rank + 1) * TIMES // world)
for _step in range(6):
    x = torch.randn(BATCH, 8, generator=own)
    mix = torch.rand(BATCH, world, generator=shared)[:, rank : rank + 1]
    rows = torch.randn(world * BATCH, 8, generator=shared)[rank * BATCH :][:BATCH]
    among = torch.randn(BATCH, world, 8, generator=shared)[:, rank]
    long = torch.randn(BATCH, TIMES, 8, generator=shared)[:, part]
    optimizer.zero_grad()
    found = model(torch.cat([(x * mix + rows)[:, None], long], 1))
    (found - among[:, None]).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
