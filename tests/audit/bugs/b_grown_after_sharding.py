# SPDX-License-Identifier: Apache-2.0
"""B: a layer is added after the model was sharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


fully_shard(net)
net.append(nn.Linear(2, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()  # here LS102
