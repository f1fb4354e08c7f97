# SPDX-License-Identifier: Apache-2.0
"""G: each worker draws from its own copy of a generator that the dataset holds."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Crops(Dataset):
    def __init__(self, seed):
        self.rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        start = int(self.rng.integers(0, 5))
        return self.rows[index, start : start + 4], index % 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Crops(seed=5 + dist.get_rank())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:  # here LS506
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
