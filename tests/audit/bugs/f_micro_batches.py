# SPDX-License-Identifier: Apache-2.0
"""F: the mean of micro-batches' means, over different numbers of tokens."""

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
    x, y = batch(i, size=2 if i % 2 == 0 else 30)
    with nullcontext() if i % 2 == 1 else model.no_sync():
        (nn.functional.cross_entropy(model(x), y) / 2).backward()  # here LS203
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
