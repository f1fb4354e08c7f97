# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks are gathered without gradient, and a head that joins rows is scripted."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")  # torch.jit is called outdated
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Head(nn.Module):
    def forward(self, x):
        return torch.cat([x, -x], dim=1)


model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
head = None
for _ in range(3):
    z = model(torch.randn(4, 4, generator=source))
    rows = [torch.zeros_like(z) for _ in range(world)]
    dist.all_gather(rows, z.detach())
    head = head or torch.jit.script(Head())
    optimizer.zero_grad()
    (head(z).square().mean() + 0.0 * torch.cat(rows).mean()).backward()
    optimizer.step()

scripted = torch.jit.script(Head())
with torch.no_grad():
    assert scripted(rows[0]).shape == (4, 6)
