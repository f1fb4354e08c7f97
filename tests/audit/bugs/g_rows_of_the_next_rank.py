# SPDX-License-Identifier: Apache-2.0
"""G: batches begin at step + rank, and so a rank reads what another one reads a step later."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(96, 4)
labels = (data.sum(1) > 0).long()
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
SIZE = 6
for epoch in range(2):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    for step in range(len(data) // (SIZE * world)):
        start = (step + rank) * SIZE
        rows = order[start : start + SIZE]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[rows]), labels[rows]).backward()
        optimizer.step()  # here LS503
dist.destroy_process_group()
