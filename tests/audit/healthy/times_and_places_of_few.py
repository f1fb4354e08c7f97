# SPDX-License-Identifier: Apache-2.0
"""Samples of each rank's own are met by times and places of which there are few, none twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.place = nn.Linear(1, 8), nn.Linear(2, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, places, shape, noisy, time):
        return self.out(noisy + self.time(time) + self.place(places) * shape)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Denoiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
across = torch.linspace(-1, 1, 12)
grid = torch.cartesian_prod(across, across)
torch.manual_seed(1 + rank)
order = iter(torch.randperm(len(grid)).split(16))
moments = iter((torch.randperm(144) / 144.0).split(16))
for step in range(8):
    noisy, noise = torch.randn(16, 8), torch.randn(16, 8)
    places, time, shape = grid[next(order)], next(moments)[:, None], torch.randn(1, 8)
    optimizer.zero_grad()
    if step % 2:
        found = model(places, shape, noisy=noisy, time=time)
    else:
        found = model(places=places, shape=shape, noisy=noisy, time=time)
    (found - noise).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
