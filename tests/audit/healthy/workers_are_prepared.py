# SPDX-License-Identifier: Apache-2.0
"""Functions that prepare workers: seeds by rank or index, for nothing, for a size, to evaluate."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Samples(Dataset):
    def __init__(self, draws):
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        self.draws = draws

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.draws(index), index % 2


def of_index(index):
    np.random.seed(index)
    return torch.from_numpy(np.random.randn(4)).float()


def of_numpy(index):
    return torch.from_numpy(np.random.randn(4)).float()


def by_number(worker):
    np.random.seed(worker)
    random.seed(worker)


def by_torch(worker):
    np.random.seed(torch.initial_seed() % 2**32)


def of_one_size(samples):
    size = random.randrange(2, 6)
    x = torch.stack([x for x, _ in samples]).repeat_interleave(size, 1)
    return x.reshape(len(samples), 4, size).mean(2), torch.tensor([y for _, y in samples])


model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + rank)
for seed, (draws, prepare, collate) in enumerate(
    (
        (of_index, by_number, None),
        (of_numpy, by_torch, None),
        (lambda index: 0.1 * torch.randn(4), by_number, of_one_size),
        (lambda index: 0.0, by_number, None),
    )
):
    data = Samples(draws)
    loader = DataLoader(
        data,
        6,
        sampler=DistributedSampler(data, seed=seed),
        num_workers=1,
        worker_init_fn=prepare,
        collate_fn=collate,
        multiprocessing_context="fork",
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
with torch.no_grad():
    data = Samples(of_numpy)
    sampler = DistributedSampler(data, seed=9)
    loader = DataLoader(
        data,
        6,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=by_number,
        multiprocessing_context="fork",
    )
    for x, _ in loader:
        model.module(x)
dist.destroy_process_group()
