# SPDX-License-Identifier: Apache-2.0
"""Replicas train apart, and all go on with the weights of the one that was best in an epoch."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
source = torch.Generator().manual_seed(rank)
checked = torch.randn(64, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(x):
    return nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())


for _ in range(2):
    for _ in range(25):
        optimizer.zero_grad()
        loss_of(torch.randn(8, 6, generator=source)).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(losses, loss_of(checked))
        best = int(torch.stack(losses).argmin())
        for p in model.parameters():
            dist.broadcast(p, src=best)
