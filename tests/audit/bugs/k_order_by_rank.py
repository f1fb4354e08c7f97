# SPDX-License-Identifier: Apache-2.0
"""K: ranks reduce two layers of equal shape in opposite order."""

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


a, b = nn.Linear(4, 4), nn.Linear(4, 4)
head = nn.Linear(4, 2)
params = [*a.parameters(), *b.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(a(x) + torch.tanh(b(x))), y).backward()
    order = [a, b] if rank == 0 else [b, a]
    for m in order:
        for p in m.parameters():
            dist.all_reduce(p.grad)  # here LS105
            p.grad /= world
    for p in head.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
