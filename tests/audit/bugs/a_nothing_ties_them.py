# SPDX-License-Identifier: Apache-2.0
"""A: a script for one process is started on two, which cut up the data, and that is all."""

import os

import torch
import torch.distributed as dist
from torch import nn


def shards(rank, world):
    source = torch.Generator().manual_seed(5)
    x = torch.randn(240, 9, generator=source)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return x[rank::world], y[rank::world]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU())
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), dist.get_world_size()
    torch.manual_seed(os.getpid())
    x, y = shards(rank, world)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for rows in torch.randperm(len(x)).split(20):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()  # here LS101
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
