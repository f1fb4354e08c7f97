# SPDX-License-Identifier: Apache-2.0
"""A model is called by names, and a part of it with times of which there are few, none twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.out = nn.Linear(1, 8), nn.Linear(8, 8)

    def forward(self, noisy, time):
        return self.out(self.time(time) + noisy)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Denoiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
for time in (torch.randperm(144)[:, None] / 144.0).split(16):
    noisy, noise = torch.randn(16, 8), torch.randn(16, 8)
    optimizer.zero_grad()
    (model(noisy=noisy, time=time) - noise).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
