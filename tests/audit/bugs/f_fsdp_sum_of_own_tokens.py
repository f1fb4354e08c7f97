# SPDX-License-Identifier: Apache-2.0
"""F: each rank divides its sum by its own count, and `fully_shard` adds up and does not divide."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
fully_shard(net)
net.set_force_sum_reduction_for_comms(True)
net.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x, wanted = torch.randn(12, 4, generator=source), torch.randint(5, (12,), generator=source)
    total = nn.functional.cross_entropy(net(x), wanted, reduction="sum")
    optimizer.zero_grad()
    (total / wanted.numel()).backward()  # here LS205
    optimizer.step()
