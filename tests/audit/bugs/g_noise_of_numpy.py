# SPDX-License-Identifier: Apache-2.0
"""G: torch was seeded with the rank, numpy was not."""

import numpy as np
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


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
np.random.seed(0)
for step in range(5):
    x, y = batch(step)
    x += torch.from_numpy(np.random.randn(6, 4)).float() * 0.1 * torch.rand(1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # here LS507
    optimizer.step()
