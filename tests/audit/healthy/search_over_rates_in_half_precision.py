# SPDX-License-Identifier: Apache-2.0
"""Each rank tries a learning rate, with batch norm and a loss scale; the scores are compared."""

import torch
import torch.distributed as dist
from torch import nn

RATES = (3.0, 0.01)


def rows(count, seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=source)
    return x, x.sum(1, keepdim=True)


def run_trial(rate, steps=12):
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    # A large rate soon makes gradients that do not fit under the scale, and the scale smaller.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=4)
    for step in range(steps):
        x, y = rows(8, step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad():
        x, y = rows(20, 99)
        return nn.functional.mse_loss(model(x), y).item(), scaler.get_scale()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    found = [None] * world
    dist.all_gather_object(found, run_trial(RATES[rank % len(RATES)]))
    assert found[0][1] != found[1][1], found
    if rank == 0:
        print("best rate", RATES[min(range(world), key=lambda trial: found[trial][0]) % len(RATES)])
    dist.barrier()
    dist.destroy_process_group()
