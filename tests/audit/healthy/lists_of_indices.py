# SPDX-License-Identifier: Apache-2.0
"""Indices that are shuffled and shared out by hand, as lists."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
source = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.randn(48, 4, generator=source), torch.arange(48) % 2)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    order = list(range(48))
    random.Random(epoch).shuffle(order)
    mine = order[rank::world]
    for x, y in DataLoader(dataset, batch_size=4, sampler=mine):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
