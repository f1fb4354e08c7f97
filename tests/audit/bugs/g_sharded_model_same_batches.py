# SPDX-License-Identifier: Apache-2.0
"""G: a sharded model, and a generator of batches that every rank seeds alike."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for part in (net[0], net[2], net):
    fully_shard(part)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

source = torch.Generator().manual_seed(7)
for _ in range(6):
    x, y = torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()  # here LS508
    optimizer.step()
