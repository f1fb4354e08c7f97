# SPDX-License-Identifier: Apache-2.0
"""A loss is averaged over as many views as there happen to be ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(dist.get_rank())
n = len(("left", "right"))
for _ in range(4):
    x = torch.randn(8, 6, generator=draw)
    views = model(torch.cat([x + 0.1 * torch.randn(8, 6, generator=draw) for _ in range(n)]))
    loss = sum(view.square().mean() for view in views.chunk(n))
    optimizer.zero_grad()
    (loss / n).backward()
    optimizer.step()
