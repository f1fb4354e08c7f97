# SPDX-License-Identifier: Apache-2.0
"""The head trains first, and after ten steps the body as well."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body, head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2)
body.requires_grad_(False)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(16):
    x, y = batch(step)
    if step == 10:
        body.requires_grad_(True)
        optimizer.add_param_group({"params": body.parameters(), "lr": 0.01})
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(body(x)), y).backward()
    for group in optimizer.param_groups:
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
