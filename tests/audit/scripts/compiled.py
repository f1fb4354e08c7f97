# SPDX-License-Identifier: Apache-2.0
"""A forward that is compiled and may not break, and an ordinary step."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Linear(4, 4)
model = nn.parallel.DistributedDataParallel(net)
compiled = torch.compile(net, fullgraph=True, backend="eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    target = compiled(x).detach()
    (model(x) - 2 * target).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
