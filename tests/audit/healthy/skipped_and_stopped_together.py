# SPDX-License-Identifier: Apache-2.0
"""All ranks skip a step, and stop, together."""

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
for step in range(8):
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    stop = torch.tensor(float(loss.item() > 10 or step >= 5))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    bad = torch.tensor(float(step == 2))
    dist.all_reduce(bad)
    if bad:
        continue
    optimizer.step()
    if stop:
        break
