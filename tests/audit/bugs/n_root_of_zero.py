# SPDX-License-Identifier: Apache-2.0
"""N: a distance that is zero for one sample of one rank, whose gradient is not a number."""

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
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(5):
    x, _ = batch(step)
    other = x.flip(0).clone()
    if step == 2 and rank == 1:
        other[3] = x[3]
    optimizer.zero_grad()
    out = model(torch.cat([x, other]))
    distance = (out[:6] - out[6:]).square().sum(1).sqrt().mean()
    distance.backward()  # here LS115
    optimizer.step()
