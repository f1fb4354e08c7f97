# SPDX-License-Identifier: Apache-2.0
"""A branch that depends on the rank, with find_unused_parameters."""

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


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.ways = net, nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x, way):
        return self.ways[way](self.net(x))


branches = Branches()
model = DistributedDataParallel(branches, find_unused_parameters=True)
optimizer = torch.optim.SGD(branches.parameters(), lr=0.1)

for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x, rank), y).backward()
    optimizer.step()
