# SPDX-License-Identifier: Apache-2.0
"""A head of each rank's own task, marked as such."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = DistributedDataParallel(net)
        torch.manual_seed(40 + rank)
        self.head = lockstep.local(nn.Linear(2, 2))

    def forward(self, x):
        return self.head(self.body(x))


m = Own()
optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(m(x), y).backward()
    optimizer.step()
