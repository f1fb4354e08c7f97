# SPDX-License-Identifier: Apache-2.0
"""G: noise and dropout are the same on all ranks, which were seeded alike."""

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


model = DistributedDataParallel(nn.Sequential(nn.Dropout(0.2), net))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(5)
for step in range(4):
    x, y = batch(step)
    x = x + 0.1 * torch.randn_like(x)  # here LS507
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
