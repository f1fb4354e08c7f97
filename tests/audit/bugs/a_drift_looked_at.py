# SPDX-License-Identifier: Apache-2.0
"""A: all weights are gathered after each step to be looked at, and no gradient is reduced."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(160, 8)
dataset = TensorDataset(x, x[:, :3].argmax(1))
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=10, sampler=sampler)


@torch.no_grad()
def drift():
    mine = parameters_to_vector(model.parameters())
    held = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(held, mine)
    return max((other - mine).abs().max().item() for other in held)


for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()  # here LS101
        optimizer.step()
        if (apart := drift()) > 1.0:
            raise RuntimeError(f"the replicas are {apart:.3g} apart")
    print(rank, epoch, round(loss.item(), 4), f"drift {apart:.3g}")
dist.destroy_process_group()
