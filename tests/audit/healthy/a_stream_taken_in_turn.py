# SPDX-License-Identifier: Apache-2.0
"""All ranks read one stream, change its samples each in its way, and take its batches in turn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


class Stream(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(2)
        own = torch.Generator().manual_seed(100 + rank)
        for _ in range(96):
            point = torch.randn(8, generator=g)
            label = torch.randint(3, (), generator=g)
            yield point + 0.1 * torch.randn(8, generator=own), label


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for place, (x, y) in enumerate(DataLoader(Stream(), batch_size=6)):
        if place % world == rank:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
