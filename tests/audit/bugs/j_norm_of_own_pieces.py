# SPDX-License-Identifier: Apache-2.0
"""J: each rank clips its pieces by the norm of its pieces."""

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
    pieces = [p.grad.to_local() for p in net.parameters()]
    norm = sum(piece.square().sum() for piece in pieces).sqrt()
    for piece in pieces:
        piece *= min(1.0, 0.01 / float(norm))
    optimizer.step()  # here LS104
