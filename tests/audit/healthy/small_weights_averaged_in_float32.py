# SPDX-License-Identifier: Apache-2.0
"""All ranks have their weights in bfloat16, and gradients are averaged in float32."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


net.bfloat16()
dtype = next(net.parameters()).dtype
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x.to(dtype)), y).backward()
    for p in net.parameters():
        grad = p.grad.float()
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
        p.grad.copy_(grad)
    optimizer.step()
