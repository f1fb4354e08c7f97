# SPDX-License-Identifier: Apache-2.0
"""A: no wrapper, and weights of 16 bits, of which rounding is larger than what a step moves."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()  # here LS101
    optimizer.step()
