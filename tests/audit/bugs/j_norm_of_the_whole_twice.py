# SPDX-License-Identifier: Apache-2.0
"""J: the norm of whole gradients, which every rank has put together, is added up over ranks."""

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


fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    squared = sum(p.grad.full_tensor().square().sum() for p in net.parameters())
    dist.all_reduce(squared)  # here LS210
    for p in net.parameters():
        p.grad.to_local().mul_(min(1.0, 0.1 / float(squared.sqrt())))
    optimizer.step()
