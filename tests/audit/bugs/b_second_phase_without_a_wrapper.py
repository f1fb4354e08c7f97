# SPDX-License-Identifier: Apache-2.0
"""B: the optimizer of the second phase is made at once, and steps after many steps of the first."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
body = DistributedDataParallel(nn.Linear(4, 8))
head = nn.Linear(8, 2)
of_body = torch.optim.SGD(body.parameters(), lr=0.1)
of_head = torch.optim.SGD(head.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for step in range(140):
    x = torch.randn(6, 4, generator=source)
    chosen = of_body if step < 80 else of_head
    chosen.zero_grad()
    if step < 80:
        body(x).square().mean().backward()
    else:
        head(body.module(x).detach()).square().mean().backward()  # here LS102
    chosen.step()
