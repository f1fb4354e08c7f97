# SPDX-License-Identifier: Apache-2.0
"""Each rank draws partners for all samples, in each epoch, and a sampler shares them out."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


class Mixed(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.points = torch.randn(192, 8, generator=g)
        self.kinds = torch.randint(3, (192,), generator=g)

    def draw(self):
        self.partners = np.random.permutation(192)

    def __len__(self):
        return 192

    def __getitem__(self, index):
        other = self.points[int(self.partners[index])]
        return 0.8 * self.points[index] + 0.2 * other, self.kinds[index]


np.random.seed(30 + rank)
data = Mixed()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    data.draw()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
