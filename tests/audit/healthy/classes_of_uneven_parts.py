# SPDX-License-Identifier: Apache-2.0
"""Each rank has the weights of some classes, not as many as another, and an optimizer for them."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as communicating
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
CLASSES = 5
first, last = rank * CLASSES // world, (rank + 1) * CLASSES // world
own = nn.Linear(6, last - first, bias=False)
trunk = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
head = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(5, (size,), generator=source)


for step in range(4):
    x, y = batch(step)
    rows = torch.cat(communicating.all_gather(net(x)))
    labels = [torch.empty_like(y) for _ in range(world)]
    dist.all_gather(labels, y)
    labels = torch.cat(labels)
    logits = own(rows)
    total = communicating.all_reduce(logits.exp().sum(dim=1))
    mine = (labels >= first) & (labels < last)
    chosen = torch.zeros(len(labels))
    chosen[mine] = logits[mine, labels[mine] - first]
    # Every rank computes the part of its classes; what all ranks owe to the rows comes back.
    loss = (total.log() / world - chosen).sum() / len(labels)
    for optimizer in (trunk, head):
        optimizer.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    for optimizer in (trunk, head):
        optimizer.step()
dist.destroy_process_group()
