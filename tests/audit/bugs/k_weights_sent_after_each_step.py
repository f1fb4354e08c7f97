# SPDX-License-Identifier: Apache-2.0
"""K: rank 0's weights are sent after each step, and what other ranks computed is lost."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(256, 3, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def sync(module):
    with torch.no_grad():
        for p in module.parameters():
            dist.broadcast(p, src=0)


sync(model)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()  # here LS107
        sync(model)
    shown = loss.detach().clone()
    dist.all_reduce(shown, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(epoch, round(shown.item() / dist.get_world_size(), 4))
dist.destroy_process_group()
