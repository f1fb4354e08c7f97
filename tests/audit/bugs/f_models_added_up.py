# SPDX-License-Identifier: Apache-2.0
"""Scale: replicas are to be averaged every second step, and are added up."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    if step % 2 == 1:
        for p in net.parameters():
            dist.all_reduce(p.data)  # here LS205
