# SPDX-License-Identifier: Apache-2.0
"""Each rank has a part of the data to itself, and all take the same places of theirs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(64, 4)[rank::world]
labels = (data.sum(1) > 0).long()
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(5)
for _step in range(8):
    rows = torch.randint(len(data), (9,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data[rows]), labels[rows]).backward()
    optimizer.step()
dist.destroy_process_group()
