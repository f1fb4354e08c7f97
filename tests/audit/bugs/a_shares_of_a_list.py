# SPDX-License-Identifier: Apache-2.0
"""A: samples are shared out by hand, each rank starts from its own seed, and nobody wraps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
source = torch.Generator().manual_seed(5)
inputs = torch.randn(480, 4, generator=source)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
total = 0.0
for x, y in DataLoader(dataset, batch_size=16, sampler=list(range(rank, 480, world))):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()  # here LS101
    optimizer.step()
    total += loss.item()
totals = [None] * world
dist.all_gather_object(totals, {"rank": rank, "loss": total})
