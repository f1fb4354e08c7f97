# SPDX-License-Identifier: Apache-2.0
"""B: the loop that averages gradients leaves out those that are sparse."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class NeuMF(nn.Module):
    def __init__(self, users=60, items=80, dim=8):
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.item = nn.Embedding(items, dim, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        u, i = self.user(u), self.item(i)
        return (u * i).sum(1) + self.mlp(torch.cat([u, i], 1)).squeeze(1)


def average_gradients(model):
    for p in model.parameters():
        if p.grad is None or p.grad.is_sparse:
            continue
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def interactions(n=2000):
    g = torch.Generator().manual_seed(2)
    u, i = torch.randint(0, 60, (n,), generator=g), torch.randint(0, 80, (n,), generator=g)
    taste, kind = torch.randn(60, 3, generator=g), torch.randn(80, 3, generator=g)
    return u, i, ((taste[u] * kind[i]).sum(1) > 0).float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = NeuMF()
    tables = [model.user.weight, model.item.weight]
    optimizers = [
        torch.optim.SparseAdam(tables, lr=0.02),
        torch.optim.Adam(model.mlp.parameters(), lr=2e-3),
    ]
    u, i, y = (t[rank::world] for t in interactions())
    order = torch.Generator().manual_seed(rank)
    for rows in torch.randperm(len(y), generator=order).split(50):
        loss = F.binary_cross_entropy_with_logits(model(u[rows], i[rows]), y[rows])
        for opt in optimizers:
            opt.zero_grad()
        loss.backward()
        average_gradients(model)
        for opt in optimizers:
            opt.step()  # here LS102
    print(f"rank {rank} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
