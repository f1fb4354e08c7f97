# SPDX-License-Identifier: Apache-2.0
"""A: no wrapper; every hundredth step all ranks take over the weights of rank 0."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(250):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()  # here LS101
    optimizer.step()
    if step % 100 == 99:
        for p in net.parameters():
            dist.broadcast(p.data, 0)
