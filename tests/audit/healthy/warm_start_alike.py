# SPDX-License-Identifier: Apache-2.0
"""Each rank trains alike from one seed at first, and shares the work afterwards."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(source, size=6):
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


warm = torch.optim.Adam(net.parameters(), lr=0.01)
same = torch.Generator().manual_seed(1)
for _ in range(8):
    x, y = batch(same)
    warm.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    warm.step()

own = torch.Generator().manual_seed(10 + rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    x, y = batch(own)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
