# SPDX-License-Identifier: Apache-2.0
"""F: gradients of means are added up over the shards' ranks, and divided by 1."""

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


fully_shard(net[0])
fully_shard(net)
for module in (net[0], net):
    module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply and add up in one
    module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()  # here LS205
    optimizer.step()
