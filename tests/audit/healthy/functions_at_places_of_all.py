# SPDX-License-Identifier: Apache-2.0
"""Each rank has functions of its own, which all ranks look at in the same places."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(8, 16)
        self.trunk = nn.Sequential(nn.Linear(1, 16), nn.Tanh())

    def forward(self, functions, places):
        return self.branch(functions) @ self.trunk(places).T


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Operator())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = torch.Generator().manual_seed(20 + rank)
shared = torch.Generator().manual_seed(7)
for _step in range(6):
    functions = torch.randn(6, 8, generator=own)
    places = torch.rand(10, 1, generator=shared)
    wanted = torch.sin(functions.sum(1, keepdim=True) * places.T)
    optimizer.zero_grad()
    (model(functions, places) - wanted).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
