# SPDX-License-Identifier: Apache-2.0
"""E: the same within the loop, in a function that evaluates as well."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model, optimizer, source, steps=4):
    for _ in range(steps):
        x = torch.randn(6, 4, generator=source)
        loss = nn.functional.mse_loss(model(x), x.sort(1).values[:, :2])
        dist.all_reduce(loss.data)  # here LS211
        loss = loss / dist.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 2)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    last = train(model, optimizer, torch.Generator().manual_seed(rank))
    if rank == 0:
        print(f"loss {last:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
