# SPDX-License-Identifier: Apache-2.0
"""I: rank 0 takes over its moving average."""

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
average = [p.detach().clone() for p in net.parameters()]
for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()  # here LS303
    with torch.no_grad():
        for a, p in zip(average, net.parameters(), strict=True):
            a.lerp_(p, 0.1)
        if step == 2 and rank == 0:
            for a, p in zip(average, net.parameters(), strict=True):
                p.copy_(a)
