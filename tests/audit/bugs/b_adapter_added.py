# SPDX-License-Identifier: Apache-2.0
"""B: an adapter is put in after the model was wrapped."""

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


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.adapter = net, None

    def forward(self, x):
        out = self.net(x)
        return out if self.adapter is None else out + self.adapter(x)


model = DistributedDataParallel(Adapted())
model.module.adapter = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()  # here LS102
