# SPDX-License-Identifier: Apache-2.0
"""G: the noise that a model is to find comes from a generator with the same seed on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source)


class Noise:
    def __init__(self, seed):
        self.source = torch.Generator().manual_seed(seed)

    def like(self, x):
        return torch.randn(x.shape, generator=self.source)  # here LS507


model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
noise = Noise(3)
for step in range(4):
    optimizer.zero_grad()
    for part in range(2):
        x = batch(2 * step + part)
        added = noise.like(x)
        found = model(0.8 * x + 0.6 * added)
        (nn.functional.mse_loss(found, added) / 2).backward()
    optimizer.step()
dist.destroy_process_group()
