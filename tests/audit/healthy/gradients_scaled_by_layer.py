# SPDX-License-Identifier: Apache-2.0
"""After the average the backbone's gradients are halved by hand, and those of the head doubled."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
backbone, head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 2)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(nn.Sequential(backbone, nn.Tanh(), head))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    shown = torch.stack([loss.detach(), torch.ones(())])
    dist.all_reduce(shown)
    for p in backbone.parameters():
        p.grad *= 0.5
    for p in head.parameters():
        p.grad *= 2.0
    optimizer.step()
