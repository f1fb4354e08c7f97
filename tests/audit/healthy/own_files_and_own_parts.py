# SPDX-License-Identifier: Apache-2.0
"""Samples that belong to a rank have indices that other ranks' samples have as well."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


def file(number):
    source = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(24, 4, generator=source), torch.arange(24) % 2)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alone = DistributedSampler(file(rank), num_replicas=1, rank=0)
loaders = [
    DataLoader(file(rank), batch_size=6, shuffle=True, generator=torch.Generator()),
    DataLoader(file(10 + rank), batch_size=6, sampler=alone),
    DataLoader(Subset(file(0), range(rank, 24, world)), batch_size=6),
]
for loader in loaders:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
