# SPDX-License-Identifier: Apache-2.0
"""Gradients through a gradient step, averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x, y = batch(step)
    fast = dict(net.named_parameters())
    inner = nn.functional.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)
    grads = torch.autograd.grad(inner, fast.values(), create_graph=True)
    fast = {k: v - 0.1 * g for (k, v), g in zip(fast.items(), grads, strict=True)}
    outer = nn.functional.cross_entropy(torch.func.functional_call(net, fast, (x + 0.1,)), y)
    optimizer.zero_grad()
    outer.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
