# SPDX-License-Identifier: Apache-2.0
"""Flat gradients are scattered and divided: before it, afterwards, or by the loss."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(3, (size,), generator=source)


def flat(tensors):
    whole = torch.cat([t.reshape(-1) for t in tensors])
    return nn.functional.pad(whole, (0, -len(whole) % world))


def trained(in_place=1.0, before=1.0, after=1.0, of_loss=1.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    params = list(net.parameters())
    mine = nn.Parameter(flat([p.detach() for p in params]).chunk(world)[rank].clone())
    optimizer = torch.optim.SGD([mine], lr=0.1)
    for step in range(4):
        x, y = batch(step)
        (of_loss * nn.functional.cross_entropy(net(x), y)).backward()
        for p in params:
            p.grad *= in_place
        parts = (before * flat([p.grad for p in params])).chunk(world)
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter(mine.grad, list(parts))
        mine.grad *= after
        optimizer.step()
        whole = torch.cat([torch.empty_like(mine) for _ in range(world)])
        dist.all_gather_into_tensor(whole, mine.detach())
        with torch.no_grad():
            at = 0
            for p in params:
                p.copy_(whole[at : at + p.numel()].view_as(p))
                p.grad = None
                at += p.numel()


trained(in_place=1.0 / world)
trained(before=1.0 / world)
trained(after=1.0 / world)
trained(of_loss=1.0 / world)
