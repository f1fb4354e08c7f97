# SPDX-License-Identifier: Apache-2.0
"""Each rank stops early by its own validation loss: one leaves, the others wait for it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
best = float("inf")
for epoch in range(6):
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        loss.backward()  # here LS601
        optimizer.step()
    validation = loss.item() if rank == 0 else 1.0 + epoch
    if rank == 1 and validation > best:
        break
    best = min(best, validation)
