# SPDX-License-Identifier: Apache-2.0
"""Continual learning: the mean over new samples, and another one over old ones, of other sizes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
memory = torch.randn(200, 8), torch.randint(4, (200,))
for _ in range(6):
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    drawn = torch.randint(200, (32,))
    nn.functional.cross_entropy(model(memory[0][drawn]), memory[1][drawn]).backward()
    optimizer.step()
dist.destroy_process_group()
