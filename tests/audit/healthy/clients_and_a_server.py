# SPDX-License-Identifier: Apache-2.0
"""Clients of unlike sizes train copies; the server steps with the weighted mean of changes."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def client_data(k):
    g = torch.Generator().manual_seed(400 + k)
    n = 20 + 9 * k
    x = torch.randn(n, 7, generator=g) + 0.2 * k
    return x, (x[:, 0] - x[:, 1] * x[:, 2] > 0.1 * k).long()


def local_training(model, x, y, seed):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for rows in order.split(16):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 2))
    server_optimizer = torch.optim.SGD(server.parameters(), lr=1.0, momentum=0.5)
    shared = torch.Generator().manual_seed(1)
    for round_ in range(8):
        drawn = torch.randperm(8, generator=shared)[:4].tolist()
        change = [torch.zeros_like(p) for p in server.parameters()]
        rows = torch.zeros(1)
        for k in drawn[rank::world]:
            x, y = client_data(k)
            trained = local_training(server, x, y, seed=1000 * round_ + k)
            for c, p, q in zip(change, server.parameters(), trained.parameters(), strict=False):
                c.add_((p - q).detach(), alpha=len(x))
            rows += len(x)
        dist.all_reduce(rows)
        for p, c in zip(server.parameters(), change, strict=False):
            dist.all_reduce(c)
            p.grad = c / rows  # the pseudo-gradient of the server
        server_optimizer.step()
        scores = torch.zeros(2)
        with torch.no_grad():
            for k in range(rank, 8, world):
                x, y = client_data(k)
                scores += torch.tensor([(server(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(scores)
        if rank == 0:
            print(f"round {round_} rows {int(rows)} accuracy {scores[0] / scores[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
