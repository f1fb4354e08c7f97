# SPDX-License-Identifier: Apache-2.0
"""The head is in no wrapper, and each rank has drawn its own: only told as a notice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
drawn = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=drawn)
data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
torch.manual_seed(100 + rank)
trunk = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU()))
head = nn.Linear(16, 2)
optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for rows, labels in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(trunk(rows)), labels)
        loss.backward()
        optimizer.step()  # here LS102
dist.destroy_process_group()
