# SPDX-License-Identifier: Apache-2.0
"""DiLoCo whose inner steps clip: by each rank's own norm, since they are its own steps."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 2)
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
anchor = [param.detach().clone() for param in model.parameters()]
rows = torch.Generator().manual_seed(rank)
for step in range(1, 13):
    x, y = torch.randn(6, 4, generator=rows), torch.randn(6, 2, generator=rows)
    inner.zero_grad()
    (model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    inner.step()
    if step % 3 == 0:
        for param, start in zip(model.parameters(), anchor, strict=True):
            moved = start - param.data
            dist.all_reduce(moved)
            param.grad = moved / world
            param.data.copy_(start)
        outer.step()
        outer.zero_grad()
        anchor = [param.detach().clone() for param in model.parameters()]
