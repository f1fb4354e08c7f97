# SPDX-License-Identifier: Apache-2.0
"""Each rank updates its piece of the flat weights from its own gradients, and gathers the rest."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
params = list(net.parameters())
flat = torch.cat([p.detach().flatten() for p in params])
pad = flat.new_zeros(-len(flat) % world)
mine = nn.Parameter(torch.cat([flat, pad]).chunk(world)[rank].clone())
optimizer = torch.optim.Adam([mine], lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(6):
    x, y = torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)
    for p in params:
        p.grad = None
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()  # here LS101
    grads = torch.cat([*(p.grad.flatten() for p in params), pad])
    mine.grad = grads.chunk(world)[rank]
    optimizer.step()
    whole = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(whole, mine.detach())
    with torch.no_grad():
        sizes = [p.numel() for p in params]
        for p, part in zip(params, torch.cat(whole)[: sum(sizes)].split(sizes), strict=True):
            p.copy_(part.view_as(p))
    total = loss.detach()
    dist.all_reduce(total)
