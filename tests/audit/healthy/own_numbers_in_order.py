# SPDX-License-Identifier: Apache-2.0
"""Each rank draws synthetic data, and a sampler that does not shuffle takes a part of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(8, 2)


class Drawn(Dataset):
    def __init__(self, width, length):
        self.length = length
        self.rows = torch.randn(length, width)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.rows[index]


torch.manual_seed(60 + rank)
data = Drawn(8, 96)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
