# SPDX-License-Identifier: Apache-2.0
"""F: a rank with more micro-batches averages over them, and then counts the same."""

from contextlib import nullcontext

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
micro_batches = 2 if rank == 0 else 4
for step in range(3):
    optimizer.zero_grad()
    for place in range(micro_batches):
        x, y = batch(10 * step + place)
        with nullcontext() if place == micro_batches - 1 else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / micro_batches
            loss.backward()  # here LS203
    optimizer.step()
