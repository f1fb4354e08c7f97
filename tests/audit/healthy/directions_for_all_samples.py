# SPDX-License-Identifier: Apache-2.0
"""Embeddings are compared along random directions, which all ranks have to share."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
ROWS, WIDTH, DIRECTIONS = 12, 12, 6
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, WIDTH))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = torch.Generator().manual_seed(20 + rank)


class AlongDirections(nn.Module):
    def forward(self, z, step):
        source = torch.Generator().manual_seed(step)
        along = torch.randn(WIDTH, DIRECTIONS, generator=source)
        return ((z @ along).square().mean(0) - 1).square().mean()


term = AlongDirections()
for step in range(6):
    x = torch.randn(ROWS, 6, generator=own)
    z = model(x)
    optimizer.zero_grad()
    ((z - x.mean(1, keepdim=True)).square().mean() + 0.1 * term(z, step)).backward()
    optimizer.step()
dist.destroy_process_group()
