# SPDX-License-Identifier: Apache-2.0
"""F: the loss is divided by the number of ranks, which has one letter."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(dist.get_rank())
n = dist.get_world_size()
for _ in range(4):
    x = torch.randn(8, 6, generator=draw)
    views = model(x)
    loss = views.square().mean()
    optimizer.zero_grad()
    (loss / n).backward()  # here LS206
    optimizer.step()
