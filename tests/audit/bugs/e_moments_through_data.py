# SPDX-License-Identifier: Apache-2.0
"""E: a cross-correlation is added up over ranks through `.detach()`, and divided by autograd."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Redundancy(nn.Module):
    def __init__(self, size, weight=0.05):
        super().__init__()
        self.weight = weight
        self.norm = nn.BatchNorm1d(size, affine=False)

    def forward(self, a, b):
        correlation = self.norm(a).T @ self.norm(b)
        shared = correlation.detach()
        dist.all_reduce(shared)  # here LS211
        correlation /= len(a) * dist.get_world_size()
        diagonal = torch.diagonal(correlation)
        off = correlation - torch.diag(diagonal)
        return (1 - diagonal).square().sum() + self.weight * off.square().sum()


def two_views(source, size=16):
    x = torch.randn(size, 6, generator=source)
    return [x + 0.2 * torch.randn(size, 6, generator=source) for _ in range(2)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 5))
    model = DistributedDataParallel(net)
    criterion = Redundancy(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(70 + rank)
    for _ in range(5):
        a, b = two_views(source)
        za, zb = model(torch.cat([a, b])).chunk(2)
        loss = criterion(za, zb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
