# SPDX-License-Identifier: Apache-2.0
"""Gradients are divided by the ranks first, and then added up: after backward, and in hooks."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body, head = nn.Linear(3, 8), nn.Linear(8, 4)
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
source = torch.Generator().manual_seed(rank)


def average(p):
    p.grad.div_(world)
    dist.all_reduce(p.grad)


for p in head.parameters():
    p.register_post_accumulate_grad_hook(average)
for _ in range(20):
    x, y = torch.randn(6, 3, generator=source), torch.randint(4, (6,), generator=source)
    body.zero_grad()
    head.zero_grad()
    nn.functional.cross_entropy(head(torch.tanh(body(x))), y).backward()
    for p in body.parameters():
        p.grad /= world
        dist.all_reduce(p.grad)
    for optimizer in optimizers:
        optimizer.step()
