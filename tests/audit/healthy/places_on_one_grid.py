# SPDX-License-Identifier: Apache-2.0
"""Each rank has shapes of its own, and a field over one grid, of which it takes all places once."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.place, self.shape, self.out = nn.Linear(2, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, places, shape):
        return self.out(torch.tanh(self.place(places) + self.shape(shape)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Field())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
across = torch.linspace(-1, 1, 12)
grid = torch.cartesian_prod(across, across)
torch.manual_seed(1 + rank)
for step, order in enumerate(torch.randperm(len(grid)).split(16)):
    shape, places = torch.randn(1, 4), grid[order]
    wanted = torch.sin(places @ shape[0, :2] + shape[0, 2:].sum())[:, None]
    given = shape.expand(len(places), 4) if step % 2 else shape
    optimizer.zero_grad()
    (model(places, given) - wanted).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
