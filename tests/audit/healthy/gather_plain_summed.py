# SPDX-License-Identifier: Apache-2.0
"""One loss on every rank, of rows gathered without gradient; the gradients add up to the truth.

What stands behind the gather has the whole gradient on every rank, and so its average is used.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(4, 5)
        self.heat = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, y):
        return F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)


def of_all_ranks(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def reduce_gradients(towers):
    for parameter in towers.parameters():
        dist.all_reduce(parameter.grad)
    towers.heat.grad /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
towers = Towers()
optimizer = torch.optim.AdamW(towers.parameters(), lr=3e-3)
draw = torch.Generator().manual_seed(40 + dist.get_rank())
for _ in range(12):  # more than are looked at closely
    x = torch.randn(8, 6, generator=draw)
    left, right = map(of_all_ranks, towers(x, x[:, :4].cos()))
    scores = towers.heat.exp() * left @ right.T
    wanted = torch.arange(len(scores))
    loss = (F.cross_entropy(scores, wanted) + F.cross_entropy(scores.T, wanted)) / 2
    optimizer.zero_grad()
    loss.backward()
    reduce_gradients(towers)
    nn.utils.clip_grad_norm_(towers.parameters(), 0.5)
    optimizer.step()
dist.destroy_process_group()
