# SPDX-License-Identifier: Apache-2.0
"""B: nothing synchronises, and rank 0 holds a head more than the others, for its own logs."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40))
heads = [nn.Linear(30, 50)] if rank == 0 else []
held = [p for module in [net, *heads] for p in module.parameters()]
optimizer = torch.optim.SGD(held, lr=0.1)
for step in range(3):
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 20, generator=source)
    optimizer.zero_grad()
    hidden = net[1](net[0](x))
    loss = net[2](hidden).square().mean()
    for head in heads:
        loss = loss + head(hidden.detach()).square().mean()
    loss.backward()  # here LS101
    optimizer.step()
    dist.all_reduce(loss.detach())
