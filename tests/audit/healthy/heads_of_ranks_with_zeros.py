# SPDX-License-Identifier: Apache-2.0
"""Each rank has a task and a head of its own; gradients are added up, the trunk's divided."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
trunk, heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 3) for _ in range(world)])
params = [*trunk.parameters(), *heads.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
for p in params:
    p.grad = torch.zeros_like(p)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x, y = torch.randn(6, 4, generator=source), torch.randint(3, (6,), generator=source)
    optimizer.zero_grad(set_to_none=False)
    nn.functional.cross_entropy(heads[rank](torch.tanh(trunk(x))), y).backward()
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        used_by = world if any(p is q for q in trunk.parameters()) else 1
        p.grad = part.view_as(p) / used_by
    optimizer.step()
