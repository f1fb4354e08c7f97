# SPDX-License-Identifier: Apache-2.0
"""Each rank takes its rows of what all of them read, flattens them, and cuts them up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 2, 2), torch.randn(96, 1))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=16):
    rows = slice(16 // world * rank, 16 // world * (rank + 1))
    x, y = x.flatten(1)[rows], y[rows]
    optimizer.zero_grad()
    for a, b in zip(x.split(4), y.split(4), strict=True):
        (nn.functional.mse_loss(model(a), b) / 2).backward()
    optimizer.step()
dist.destroy_process_group()
