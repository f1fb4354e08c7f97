# SPDX-License-Identifier: Apache-2.0
"""F: a squared error is divided by the numbers in a row, and by the rows of this rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step, size):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randn(size, 3, generator=source)


for step in range(5):
    x, y = batch(step, 8 if rank == 0 else 5)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y, reduction="sum") / 3 / len(x)
    loss.backward()  # here LS203
    optimizer.step()
dist.destroy_process_group()
