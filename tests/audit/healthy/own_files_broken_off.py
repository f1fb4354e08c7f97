# SPDX-License-Identifier: Apache-2.0
"""Each rank shuffles files of its own, as many as another, and stops half way through."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
files = torch.randn(64, 4, generator=torch.Generator().manual_seed(30 + rank))
data = TensorDataset(files, (files.sum(1) > 0).long())
order = torch.Generator().manual_seed(40 + rank)
loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
for step, (x, y) in enumerate(loader):
    if step == len(loader) // world:
        break
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
