# SPDX-License-Identifier: Apache-2.0
"""Between steps each rank fills a cache that no state dict holds."""

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


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
        self.register_buffer("seen", torch.zeros(3, 4), persistent=False)

    def forward(self, x):
        if not self.training:
            self.seen.copy_(x[:3])
        return self.net(x)


model = DistributedDataParallel(Generator())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    model.eval()
    with torch.no_grad():
        model.module(x)
    model.train()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
