# SPDX-License-Identifier: Apache-2.0
"""Each rank trains a model of its own width with its own rate; the scores are compared."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

GRID = [{"width": 8, "lr": 0.05}, {"width": 20, "lr": 0.01}]


def run_trial(config, train, valid, epochs):
    model = nn.Sequential(nn.Linear(5, config["width"]), nn.ReLU(), nn.Linear(config["width"], 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loader = DataLoader(train, batch_size=8, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = next(iter(DataLoader(valid, batch_size=len(valid))))
        return nn.functional.mse_loss(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=gen)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    train, valid = random_split(data, [32, 8], generator=gen)
    torch.manual_seed(123 + rank)
    score = run_trial(GRID[rank % len(GRID)], train, valid, args.epochs)
    scores = [None] * world
    dist.all_gather_object(scores, score)
    if rank == 0:
        best = min(range(world), key=scores.__getitem__)
        print("best trial", GRID[best], scores[best])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
