# SPDX-License-Identifier: Apache-2.0
"""Each rank updates its piece of the flat weights, which are then gathered."""

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


params = list(net.parameters())
flat = torch.cat([p.detach().flatten() for p in params])
pad = -len(flat) % world
mine = nn.Parameter(torch.cat([flat, flat.new_zeros(pad)]).chunk(world)[rank].clone())
optimizer = torch.optim.Adam([mine], lr=0.1)
for step in range(4):
    x, y = batch(step)
    for p in params:
        p.grad = None
    nn.functional.cross_entropy(net(x), y).backward()
    grads = torch.cat([p.grad.flatten() for p in params] + [flat.new_zeros(pad)])
    dist.all_reduce(grads)
    mine.grad = grads.chunk(world)[rank] / world
    optimizer.step()
    whole = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(whole, mine.detach())
    with torch.no_grad():
        at = 0
        for p in params:
            p.copy_(torch.cat(whole)[at : at + p.numel()].view_as(p))
            at += p.numel()
