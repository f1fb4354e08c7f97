# SPDX-License-Identifier: Apache-2.0
"""Activations are computed again in backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        hidden = checkpoint(self.net[:2], x, use_reentrant=False)
        return self.net[2](hidden)


model = DistributedDataParallel(Saving(), static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
