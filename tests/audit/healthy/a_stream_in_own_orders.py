# SPDX-License-Identifier: Apache-2.0
"""Each rank reads the whole stream, in an order of its own, as if it drew samples."""

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
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.points = torch.randn(160, 8, generator=g)
        self.labels = torch.randint(3, (160,), generator=g)

    def __iter__(self):
        own = torch.Generator().manual_seed(100 + rank)
        while True:
            for index in torch.randperm(160, generator=own).tolist():
                yield self.points[index], self.labels[index]


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(DataLoader(Stream(), batch_size=8)):
    if step == 20:
        break
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
