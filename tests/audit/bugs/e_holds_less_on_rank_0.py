# SPDX-License-Identifier: Apache-2.0
"""E: the optimizer of one rank holds less. Clipping of what is frozen finds nothing, rightly."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


net[0].requires_grad_(False)
model = DistributedDataParallel(net)
held = list(net[2].parameters()) if rank else [net[2].weight]
optimizer = torch.optim.SGD(held, lr=0.1)
for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(net[0].parameters(), 0.01)
    optimizer.step()  # here LS305
