# SPDX-License-Identifier: Apache-2.0
"""Dropout, and noise that each rank draws for itself."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(nn.Sequential(nn.Dropout(0.2), net))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(20 + rank)
source = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(40, 4, generator=source), torch.arange(40) % 2)
sampler = DistributedSampler(data, drop_last=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=5, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        optimizer.step()
