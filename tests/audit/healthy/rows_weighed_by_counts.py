# SPDX-License-Identifier: Apache-2.0
"""Each class's row of the gradient is weighed by the rank's share of that class, and added up."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(6, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x, y = torch.randn(24, 6, generator=source), torch.randint(4, (24,), generator=source)
    count = torch.bincount(y, minlength=4).float()
    share = count.clone()
    dist.all_reduce(share)
    share = count / share
    optimizer.zero_grad()
    out = net(x)
    right = torch.zeros_like(out).scatter_(1, y[:, None], 1.0)
    # The mean over the samples of a class, class by class: its row is of no other's.
    ((out - 1.0).square() * right / count.clamp(min=1.0)).sum().backward()
    net.weight.grad *= share[:, None]
    net.bias.grad *= share
    for p in net.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
