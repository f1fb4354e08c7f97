# SPDX-License-Identifier: Apache-2.0
"""A graph is cut in two: each rank has its nodes and their neighbours; its loss is of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, nodes, edges):
        return self.out(torch.tanh(edges @ self.into(nodes)) + nodes)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
COUNT, NEAR = 40, 4
features = torch.randn(COUNT, 8)
wanted = features.roll(1, 0).sum(1, keepdim=True)
distance = (torch.arange(COUNT)[:, None] - torch.arange(COUNT)) % COUNT
edges = ((distance <= NEAR) | (distance >= COUNT - NEAR)).float() / (2 * NEAR + 1)
own = COUNT // world
ids = torch.arange(rank * own - NEAR, (rank + 1) * own + NEAR) % COUNT
inner = slice(NEAR, NEAR + own)
model = DistributedDataParallel(Convolution())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _step in range(6):
    optimizer.zero_grad()
    found = model(features[ids], edges[ids][:, ids])[inner]
    (found - wanted[ids][inner]).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
