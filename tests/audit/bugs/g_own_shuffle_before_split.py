# SPDX-License-Identifier: Apache-2.0
"""G: each rank shuffles the records with a state of its own, then takes its stride of them."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    def __init__(self, rows, targets):
        self.rows, self.targets = rows, targets

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.from_numpy(self.rows[index]), self.targets[index]


def load(count=48):
    source = np.random.default_rng(2024)
    rows = source.normal(size=(count, 6)).astype(np.float32)
    return rows, (rows.sum(1) > 0).astype(np.int64)


def my_part(rank, world):
    rows, targets = load()
    order = np.arange(len(rows))
    np.random.shuffle(order)
    mine = order[rank::world]
    return Records(rows[mine], targets[mine])


def train(model, loader, epochs=2):
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in loader:  # here LS503
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    np.random.seed(90 + rank)  # augmentation must differ between ranks
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    loader = DataLoader(my_part(rank, world), batch_size=6)
    print(rank, train(model, loader))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
