# SPDX-License-Identifier: Apache-2.0
"""F: what autograd.grad returns is added up over ranks, and then put in place."""

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


weights = list(net.parameters())
optimizer = torch.optim.SGD(weights, lr=0.1)
for step in range(3):
    x, y = batch(step)
    loss = nn.functional.cross_entropy(net(x), y)
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        dist.all_reduce(gradient)  # here LS205
        weight.grad = gradient
    optimizer.step()
