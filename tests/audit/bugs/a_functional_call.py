# SPDX-License-Identifier: Apache-2.0
"""A: the forward is functional, on the module's own parameters."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    weights = dict(model.module.named_parameters())
    out = torch.func.functional_call(model.module, weights, (x,))  # here LS101
    nn.functional.cross_entropy(out, y).backward()
    optimizer.step()
