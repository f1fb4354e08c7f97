# SPDX-License-Identifier: Apache-2.0
"""Sums divided by the tokens of all ranks and micro-batches, times the ranks."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    window = []
    for _ in range(2):
        wanted = torch.randint(0, 5, (12,), generator=source)
        wanted[torch.randint(0, 12, (2 + rank,), generator=source)] = -100
        window.append((torch.randn(12, 4, generator=source), wanted))
    mine = sum((wanted != -100).sum() for _, wanted in window).view(1)
    counts = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(counts, mine)
    items = torch.cat(counts).sum()
    optimizer.zero_grad()
    for last, (x, wanted) in enumerate(window):
        with nullcontext() if last else model.no_sync():
            out = model(x)
            loss = nn.functional.cross_entropy(out, wanted, reduction="sum")
            loss = loss + 1e-3 * out.logsumexp(1)[wanted != -100].square().sum()
            (loss * world / items).backward()
    optimizer.step()
