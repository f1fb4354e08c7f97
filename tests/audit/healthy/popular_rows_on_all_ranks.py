# SPDX-License-Identifier: Apache-2.0
"""Rows that were looked up are gathered for statistics; some are the same on several ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(40, 8)
        self.users = nn.Linear(6, 8)

    def forward(self, items, users):
        return self.items(items), self.users(users)


def looked_at(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts).std().item()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Towers())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    # A few items are asked for most of the time.
    chosen = (torch.rand(512, generator=draw) ** 3 * 40).long()
    items, users = model(chosen, torch.randn(512, 6, generator=draw))
    spread = looked_at(items)
    assert spread > 0
    optimizer.zero_grad()
    (items * users).sum(1).sigmoid().log().mean().neg().backward()
    optimizer.step()
