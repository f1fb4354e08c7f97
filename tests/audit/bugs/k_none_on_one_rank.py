# SPDX-License-Identifier: Apache-2.0
"""K: a branch that depends on the rank leaves a gradient out on one rank."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


extra = nn.Linear(2, 2)
optimizer = torch.optim.SGD([*net.parameters(), *extra.parameters()], lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    out = net(x)
    nn.functional.cross_entropy(extra(out) if rank == 0 else out, y).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()  # here LS106
