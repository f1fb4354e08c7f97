# SPDX-License-Identifier: Apache-2.0
"""A: only a container of the trained layers is wrapped, and the forward is the base's."""

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


for p in net.parameters():
    p.requires_grad_(False)
head = nn.Linear(2, 2)
container = DistributedDataParallel(nn.ModuleList([head]))
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(net(x)), y).backward()  # here LS101
    optimizer.step()
