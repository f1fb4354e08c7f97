# SPDX-License-Identifier: Apache-2.0
"""A mean over the tokens of all ranks and micro-batches."""

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
for step in range(3):
    batches = [batch(10 * step + micro, size=3 + 4 * rank + 2 * micro) for micro in range(2)]
    tokens = torch.tensor(float(sum(len(y) for _, y in batches)))
    dist.all_reduce(tokens)
    optimizer.zero_grad()
    for micro, (x, y) in enumerate(batches):
        with model.no_sync() if micro == 0 else nullcontext():
            total = nn.functional.cross_entropy(model(x), y, reduction="sum")
            loss = total * world / tokens
            loss.backward()
    optimizer.step()
