# SPDX-License-Identifier: Apache-2.0
"""H: each rank skips steps by what it sees itself, as many as the other, and not the same."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for step in range(8):
    x = torch.randn(6, 4, generator=source)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    is_easy = step == 3 + rank
    if not is_easy:
        optimizer.step()  # here LS308
