# SPDX-License-Identifier: Apache-2.0
"""Divides by the tokens of all ranks and micro-batches; those of one micro-batch are logged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def everywhere(count):
    """What all ranks have together."""
    mine = torch.tensor([float(count)])
    counts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(counts, mine)
    return torch.cat(counts).sum()


seen = 0.0
for step in range(4):
    window = [batch(2 * step + part) for part in range(2)]
    items = everywhere(sum(len(y) for _, y in window))
    optimizer.zero_grad()
    for x, y in window:
        seen += everywhere(len(y))
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / items
        (loss * world).backward()
    optimizer.step()
