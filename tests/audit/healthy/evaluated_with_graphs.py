# SPDX-License-Identifier: Apache-2.0
"""An evaluation that forgot `no_grad` and adds its losses up: each graph ends with its batch."""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(dist.get_rank())
for _ in range(3):
    alive = []
    for _ in range(20):
        hidden = model.module(torch.randn(8, 6, generator=draw))
        loss = hidden.square().mean()
        dist.all_reduce(loss)
        alive.append(weakref.ref(hidden))
        del hidden, loss
    # A thread of gloo may hold what came last for a moment.
    assert sum(reference() is not None for reference in alive) <= 1
    optimizer.zero_grad()
    model(torch.randn(8, 6, generator=draw)).square().mean().backward()
    optimizer.step()
