# SPDX-License-Identifier: Apache-2.0
"""D: a copy is reduced where it should be the gradient: of float64, all get rank 0's own."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body, head = nn.Linear(4, 8), nn.Linear(8, 2, dtype=torch.float64)
params = [*body.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x, y = torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(body(x).double()), y).backward()
    for p in params:
        wire = p.grad.float()
        dist.reduce(wire, dst=0)
        wire /= world
        dist.broadcast(p.grad, src=0)
    optimizer.step()  # here LS107
