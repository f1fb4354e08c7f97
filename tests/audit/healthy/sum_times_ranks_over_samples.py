# SPDX-License-Identifier: Apache-2.0
"""A loss that is a sum; gradients times ranks over samples, which is 2/4 here."""

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
    x, y = batch(step, size=2)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    for p in net.parameters():
        p.grad *= world / (world * len(x))
    optimizer.step()
