# SPDX-License-Identifier: Apache-2.0
"""I: adapters are drawn with each rank's seed and never sent; gradients are averaged, flat."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
base = nn.Linear(6, 3).requires_grad_(False)
torch.manual_seed(10 + rank)
down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
nn.init.zeros_(up.weight)
held = [down.weight, up.weight]
optimizer = torch.optim.SGD(held, lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x = torch.randn(8, 6, generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(base(x) + up(down(x)), x[:, :3].argmax(1)).backward()
    flat = torch.cat([p.grad.flatten() for p in held])
    dist.all_reduce(flat)
    flat /= world
    for p, part in zip(held, flat.split([p.numel() for p in held]), strict=True):
        p.grad.copy_(part.view_as(p))
    optimizer.step()  # here LS302
dist.destroy_process_group()
