# SPDX-License-Identifier: Apache-2.0
"""J: the gradient of each unit is cut to a part of its weights' norm before it is averaged."""

import torch
import torch.distributed as dist
from torch import nn


def lengths(rows):
    return rows.flatten(1).norm(dim=1, keepdim=True) if rows.ndim > 1 else rows.norm()


@torch.no_grad()
def clip_adaptively(params, factor=0.05):
    for p in params:
        limit = lengths(p).clamp(min=1e-3) * factor
        p.grad *= (limit / lengths(p.grad).clamp(min=1e-6)).clamp(max=1.0)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x, y = torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()  # here LS209
    clip_adaptively(net.parameters())
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
