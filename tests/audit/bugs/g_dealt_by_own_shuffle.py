# SPDX-License-Identifier: Apache-2.0
"""G: each rank deals its batches out of an order of its own; what it reads is augmented."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

SIZE = 4


class Signals(Dataset):
    def __init__(self, draws, n=64):
        self.draws = draws
        self.x = torch.randn(n, 12, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.mean(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index].roll(self.draws.randrange(12)), self.y[index]


class Dealt(Sampler):
    def __init__(self, count, rank, world, draws):
        self.batches = [list(range(i, i + SIZE)) for i in range(0, count, SIZE)]
        self.rank, self.world, self.draws = rank, world, draws

    def __len__(self):
        return len(self.batches) // self.world

    def __iter__(self):
        self.draws.shuffle(self.batches)
        return iter(self.batches[self.rank :: self.world])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = random.Random(10 + rank)
    data = Signals(draws)
    loader = DataLoader(data, batch_sampler=Dealt(len(data), rank, world, draws))
    for _epoch in range(2):
        for x, y in loader:  # here LS503
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
