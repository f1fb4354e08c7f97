# SPDX-License-Identifier: Apache-2.0
"""Zeros stand in for a gradient that a rank has not got, and become the mean of all."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body = nn.Linear(4, 8)
heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
model = nn.ModuleDict({"body": body, "heads": heads})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.Generator().manual_seed(rank)


def average():
    for param in model.parameters():
        grad = param.grad if param.grad is not None else torch.zeros_like(param)
        dist.all_reduce(grad)
        param.grad = grad.div_(world)


for step in range(6):
    x, y = torch.randn(6, 4, generator=rows), torch.randint(2, (6,), generator=rows)
    optimizer.zero_grad()
    nn.functional.cross_entropy(heads[(step + rank) % 3](body(x).relu()), y).backward()
    average()
    optimizer.step()
