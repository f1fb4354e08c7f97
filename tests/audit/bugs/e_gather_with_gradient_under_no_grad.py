# SPDX-License-Identifier: Apache-2.0
"""E: a gather that has a backward, called under no_grad."""

import torch
import torch.distributed as dist
import torch.distributed.nn
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
    x, _ = batch(step)
    rows = model(x)
    with torch.no_grad():
        everyone = torch.stack(torch.distributed.nn.all_gather(rows))  # here LS207
    scores = rows @ everyone.flatten(0, 1).T
    optimizer.zero_grad()
    nn.functional.cross_entropy(scores, 6 * rank + torch.arange(6)).backward()
    optimizer.step()
