# SPDX-License-Identifier: Apache-2.0
"""D: sharded over the dimension of the mesh that has one rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
fully_shard(net, mesh=mesh["shard"])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()  # here LS101
    optimizer.step()
