# SPDX-License-Identifier: Apache-2.0
"""An iterable dataset that skips what belongs to others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
source = torch.Generator().manual_seed(5)


class Stream(IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(3)
        for number in range(16):
            row = torch.randn(4, generator=numbers)
            if number % world == rank:
                yield row, number % 2


loader = DataLoader(Stream(), batch_size=4)

model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
