# SPDX-License-Identifier: Apache-2.0
"""F: a squared error is divided by the numbers in a row and by the rows, but not by the ranks."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randn(size, 3, generator=source)


for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    (nn.functional.mse_loss(model(x), y, reduction="sum") / 3 / len(x)).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()  # here LS205
dist.destroy_process_group()
