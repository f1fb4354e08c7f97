# SPDX-License-Identifier: Apache-2.0
"""All ranks leave out the same layers, or some would wait for others' gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            if torch.rand(()) < 0.7:
                x = x + torch.relu(block(x))
        return self.out(x)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(Deep(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(11)
for step in range(8):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
