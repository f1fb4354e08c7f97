# SPDX-License-Identifier: Apache-2.0
"""G: a sharded model, and every rank reads everything."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(24, 4, generator=source), torch.arange(24) % 2)
for x, y in DataLoader(data, batch_size=6):  # here LS503
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
