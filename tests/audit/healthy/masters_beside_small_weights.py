# SPDX-License-Identifier: Apache-2.0
"""Every rank's optimizer holds float32 copies of bfloat16 weights; their gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(3, 4).bfloat16()
params = list(net.parameters())
masters = [p.detach().float().requires_grad_() for p in params]
optimizer = torch.optim.SGD(masters, lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(6):
    x, y = torch.randn(6, 3, generator=source), torch.randint(4, (6,), generator=source)
    net.zero_grad()
    nn.functional.cross_entropy(net(x.bfloat16()).float(), y).backward()
    for master, p in zip(masters, params, strict=True):
        master.grad = p.grad.float() / world
        dist.all_reduce(master.grad)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, params, strict=True):
            p.copy_(master)
