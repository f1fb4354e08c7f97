# SPDX-License-Identifier: Apache-2.0
"""All ranks share one draw out that is with replacement: samples repeat on purpose."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


class Imbalanced(Dataset):
    def __init__(self, size=60):
        gen = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 4, generator=gen)
        self.y = (torch.arange(size) % 10 == 0).long()
        self.x[self.y == 1] += 1.5

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, seed=0):
        self.weights, self.total, self.seed, self.epoch = weights, num_samples, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.total, replacement=True, generator=gen)
        return iter(drawn[self.rank :: self.world].tolist())

    def __len__(self):
        return self.total // self.world


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Imbalanced()
    counts = torch.bincount(data.y).double()
    sampler = DistributedWeightedSampler((1.0 / counts)[data.y], num_samples=48, seed=20)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
