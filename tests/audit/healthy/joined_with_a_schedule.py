# SPDX-License-Identifier: Apache-2.0
"""Ranks have different numbers of batches, and the rate falls with each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
source = torch.Generator().manual_seed(rank)
for _ in range(3):
    with model.join(divide_by_initial_world_size=False):
        for _ in range(4 + rank):
            optimizer.zero_grad()
            model(torch.randn(6, 4, generator=source)).square().mean().backward()
            optimizer.step()
    schedule.step()
