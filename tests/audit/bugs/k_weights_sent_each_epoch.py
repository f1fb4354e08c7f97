# SPDX-License-Identifier: Apache-2.0
"""K: rank 0's weights are sent when an epoch begins, and nothing synchronises the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(400, 6)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)  # here LS107
    total = torch.zeros(1)
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(epoch, total.item())
dist.destroy_process_group()
