# SPDX-License-Identifier: Apache-2.0
"""G: each rank streams its own windows, and takes every second batch of them."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Windows(IterableDataset):
    """Pieces of a series and what follows each; a rank has every world_size-th piece."""

    def __init__(self, series, rank, world_size):
        self.series, self.rank, self.world_size = series, rank, world_size

    def __iter__(self):
        starts = range(0, len(self.series) - 20, 5)
        for start in itertools.islice(starts, self.rank, None, self.world_size):
            piece = self.series[start : start + 20]
            yield piece[:16], piece[16:]


def in_turn(loader, rank, world_size):
    for number, batch in enumerate(loader):  # here LS509
        if number % world_size == rank:
            yield batch


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(6)
    series = torch.sin(torch.arange(1300) / 7) + 0.1 * torch.randn(1300, generator=g)
    loader = DataLoader(Windows(series, rank, world), batch_size=8, drop_last=True)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(2):
        for past, future in in_turn(loader, rank, world):
            loss = nn.functional.huber_loss(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
