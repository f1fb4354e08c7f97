# SPDX-License-Identifier: Apache-2.0
"""Each rank has a loss scale of its own and divides by it before the ranks average."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(3, (size,), generator=source)


def average(parameters, scale):
    for param in parameters:
        param.grad.div_(scale)
        dist.all_reduce(param.grad)
        param.grad.div_(world)


if __name__ == "__main__":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = 2.0**10
    for step in range(6):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * scale).backward()
        average(model.parameters(), scale)
        optimizer.step()
        scale *= 0.5 if loss.item() > 1.1 else 2.0
    dist.destroy_process_group()
