# SPDX-License-Identifier: Apache-2.0
"""C: the first micro-batch is synchronised, not the last."""

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
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(6):
    x, y = batch(i)
    with nullcontext() if i % 2 == 0 else model.no_sync():
        loss = nn.functional.cross_entropy(model(x), y) / 2
        loss.backward()  # here LS101
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
