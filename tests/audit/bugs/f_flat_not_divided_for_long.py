# SPDX-License-Identifier: Apache-2.0
"""F: the same for many steps, which are not all written down."""

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


optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(200):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    gradients = [p.grad for p in net.parameters()]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for g, new in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(new.view_as(g))
    optimizer.step()  # here LS205
