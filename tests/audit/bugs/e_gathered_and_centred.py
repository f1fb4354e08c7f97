# SPDX-License-Identifier: Apache-2.0
"""E: rows are sent without their gradient, put together with this rank's own, and centred."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(size, 6, generator=source)
    return x, x + 0.1 * torch.randn(size, 6, generator=source)


def of_all_ranks(rows):
    parts = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(parts, rows.detach())  # here LS207
    parts[rank] = rows
    return torch.cat(parts)


def spread(rows):
    centred = rows - rows.mean(dim=0)
    deviation = (centred.square().mean(dim=0) + 1e-4).sqrt()
    return torch.relu(1.0 - deviation).mean()


for step in range(4):
    one, other = map(model, batch(step))
    loss = nn.functional.mse_loss(one, other) + spread(of_all_ranks(one)) + spread(other)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
