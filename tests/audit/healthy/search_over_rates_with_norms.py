# SPDX-License-Identifier: Apache-2.0
"""Each rank tries a learning rate for a model of its own, with batch norm; scores are compared."""

import torch
import torch.distributed as dist
from torch import nn

RATES = (0.1, 0.01)


def rows(count, seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=source)
    return x, x.sum(1, keepdim=True)


def run_trial(rate, steps=12):
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        x, y = rows(8, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = rows(20, 99)
        return nn.functional.mse_loss(model(x), y).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    found = [None] * world
    dist.all_gather_object(found, run_trial(RATES[rank % len(RATES)]))
    if rank == 0:
        print("best rate", RATES[min(range(world), key=lambda trial: found[trial]) % len(RATES)])
    dist.barrier()
    dist.destroy_process_group()
