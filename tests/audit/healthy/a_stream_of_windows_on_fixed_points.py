# SPDX-License-Identifier: Apache-2.0
"""Batches of a stream hold the points of a grid, which all ranks share, beside a rank's windows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Windows(IterableDataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.points = torch.rand(300, 2, generator=g)
        self.series = torch.randn(70, 300, generator=g)

    def __iter__(self):
        for begin in range(rank, 60, world):
            yield self.points, self.series[begin : begin + 9]


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points, past):
        return self.layers(torch.cat([points, past.T], dim=1)).squeeze(1)


model = DistributedDataParallel(Field())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for points, window in DataLoader(Windows(), batch_size=None):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(points, window[:8]), window[8]).backward()
    optimizer.step()
