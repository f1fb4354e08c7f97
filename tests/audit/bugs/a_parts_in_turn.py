# SPDX-License-Identifier: Apache-2.0
"""A: encoder and head are taken out of the wrapper and called in turn."""

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


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = net[:2], net[2]

    def forward(self, x):
        return self.head(self.encoder(x))


model = DistributedDataParallel(Parts())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
encoder, head = model.module.encoder, model.module.head
for step in range(3):
    x, y = batch(step)
    hidden = encoder(x)
    loss = nn.functional.cross_entropy(head(hidden), y)
    optimizer.zero_grad()
    loss.backward()  # here LS101
    optimizer.step()
