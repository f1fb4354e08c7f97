# SPDX-License-Identifier: Apache-2.0
"""Loaders are made in each epoch; rank 0 alone makes more, and evaluates in between."""

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


def run(loader, optimizer=None):
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            loss = nn.functional.cross_entropy((model if optimizer else net)(x), y)
            if optimizer:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


source = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(48, 4, generator=source), torch.arange(48) % 2)
model = DistributedDataParallel(net)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    run(DataLoader(data, batch_size=6, sampler=DistributedSampler(data, seed=epoch)), sgd)
    if rank == 0:
        run(DataLoader(data, batch_size=24))
