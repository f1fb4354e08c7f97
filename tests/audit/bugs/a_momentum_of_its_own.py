# SPDX-License-Identifier: Apache-2.0
"""A: nobody synchronises, and the optimizer keeps its momentum as a tensor, not in a dictionary."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


class Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state.get(p, torch.zeros_like(p))
                self.state[p] = 0.9 * last + p.grad
                p -= group["lr"] * self.state[p]


optimizer = Momentum(net.parameters(), {"lr": 0.1})
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()  # here LS101
