# SPDX-License-Identifier: Apache-2.0
"""J: squared norms of averaged gradients are gathered, added up, and clipped by."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def clip_global_norm_(parameters, max_norm):
    """Clips by the norm over all ranks and returns it."""
    parameters = [p for p in parameters if p.grad is not None]
    squared = sum(p.grad.double().square().sum().item() for p in parameters)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, squared)  # here LS210
    total = math.sqrt(sum(everyone))
    if total > max_norm:
        for p in parameters:
            p.grad.mul_(max_norm / (total + 1e-6))
    return total


class Critic(nn.Module):
    def __init__(self, size=5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, 12), nn.LayerNorm(12), nn.ReLU())
        self.value = nn.Linear(12, 1)

    def forward(self, observation):
        return self.value(self.body(observation)).squeeze(1)


def main(steps=6, max_norm=0.3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(61)
    model = DDP(Critic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(rank)
    norms = []
    for _ in range(steps):
        observation = torch.randn(10, 5, generator=source)
        returns = 10 * observation[:, 0] + 3
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(observation), returns)
        loss.backward()
        norms.append(clip_global_norm_(model.parameters(), max_norm))
        optimizer.step()
    if rank == 0:
        print([round(n, 3) for n in norms])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
