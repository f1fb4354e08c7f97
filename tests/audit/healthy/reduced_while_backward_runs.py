# SPDX-License-Identifier: Apache-2.0
"""Every gradient is on its way to the other ranks before backward has come to the next."""

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


def send(p):
    p.grad /= world
    on_their_way.append(dist.all_reduce(p.grad, async_op=True))


on_their_way = []
for p in net.parameters():
    p.register_post_accumulate_grad_hook(send)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    while on_their_way:
        on_their_way.pop().wait()
    optimizer.step()
