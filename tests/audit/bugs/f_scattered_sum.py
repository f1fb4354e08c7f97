# SPDX-License-Identifier: Apache-2.0
"""F: each rank steps with its part of the flat gradients, which were added up and not divided."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(3, (size,), generator=source)


def flat(tensors):
    whole = torch.cat([t.reshape(-1) for t in tensors])
    return nn.functional.pad(whole, (0, -len(whole) % world))


params = list(net.parameters())
mine = nn.Parameter(flat([p.detach() for p in params]).chunk(world)[rank].clone())
optimizer = torch.optim.SGD([mine], lr=0.1, momentum=0.9)
for step in range(4):
    x, y = batch(step)
    nn.functional.cross_entropy(net(x), y).backward()
    mine.grad = torch.empty_like(mine)
    dist.reduce_scatter_tensor(mine.grad, flat([p.grad for p in params]))  # here LS205
    optimizer.step()
    whole = torch.cat([torch.empty_like(mine) for _ in range(world)])
    dist.all_gather_into_tensor(whole, mine.detach())
    with torch.no_grad():
        at = 0
        for p in params:
            p.copy_(whole[at : at + p.numel()].view_as(p))
            p.grad = None
            at += p.numel()
