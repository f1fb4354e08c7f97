# SPDX-License-Identifier: Apache-2.0
"""Two stages of one shape, one on each rank; what passes between them is sent by hand."""

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


stage = nn.Linear(4, 4)
optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    passed = torch.empty(6, 4)
    if rank == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        dist.recv(passed, 1)
        out.backward(passed)
    else:
        dist.recv(passed, 0)
        passed.requires_grad_()
        nn.functional.cross_entropy(stage(passed), y).backward()
        dist.send(passed.grad, 0)
    optimizer.step()
