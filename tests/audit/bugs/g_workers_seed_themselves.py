# SPDX-License-Identifier: Apache-2.0
"""G: the loaders' seeds differ, and each worker is seeded anew by its number alone."""

import functools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shifted(Dataset):
    def __init__(self):
        source = torch.Generator().manual_seed(1)
        self.x = torch.randn(48, 4, generator=source)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index].roll(random.randrange(4)) + 0.1 * torch.randn(4), index % 2


def prepare(base, worker):
    torch.manual_seed(base + worker)  # here LS506
    random.seed(base + worker)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    data = Shifted()
    sampler = DistributedSampler(data)
    seed = functools.partial(prepare, 10)
    loader = DataLoader(
        data,
        6,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=seed,
        multiprocessing_context="spawn",
    )
    for x, y in loader:
        assert loader.worker_init_fn is seed
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()
