# SPDX-License-Identifier: Apache-2.0
"""Each window divides by four; the last micro-batch of an epoch is what its length leaves."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 4

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(120, 10), torch.randint(3, (120,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader, start=1):
        steps = number % WINDOW == 0
        with nullcontext() if steps else model.no_sync():
            (cross_entropy(model(x), y) / WINDOW).backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
