# SPDX-License-Identifier: Apache-2.0
"""The loss is computed on the wrapped module; ``--fix`` averages the gradients by hand.

Prints, as JSON, what it measures itself: gradients by step, parameter and rank, and the drift.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(4, 4)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def of_all_ranks(tensor):
    found = [torch.zeros_like(tensor) for _ in range(world)]
    dist.all_gather(found, tensor)
    return found


measured = []
for step in range(5):
    source = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(4, 4, generator=source) * 0.5 + rank
    y = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = (model.module(x) - y).square().mean()
    loss.backward()
    if "--fix" in sys.argv:
        for p in model.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    gradients = {
        name: [float(g.flatten()[0]) for g in of_all_ranks(p.grad)]
        for name, p in net.named_parameters()
    }
    optimizer.step()
    apart = [of_all_ranks(p.detach()) for p in net.parameters()]
    drift = max(float((a - b).abs().max()) for a, b in apart)
    measured.append({"gradients": gradients, "drift": drift})
if rank == 0:
    print(json.dumps(measured))
