# SPDX-License-Identifier: Apache-2.0
"""E: a covariance over rows that were gathered without gradient."""

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
for step in range(4):
    x, y = batch(step)
    z = model(x)
    rows = [torch.zeros_like(z) for _ in range(world)]
    dist.all_gather(rows, z)  # here LS207
    rows[rank] = z
    z = torch.cat(rows, 0)
    z = z - z.mean(0)
    cov = z.T @ z / (len(z) - 1)
    loss = (cov - torch.eye(2)).pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
