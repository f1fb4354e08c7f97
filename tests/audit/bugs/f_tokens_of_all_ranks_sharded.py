# SPDX-License-Identifier: Apache-2.0
"""F: masked sums are divided by the tokens of all ranks, and `fully_shard` averages as well."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    x, wanted = torch.randn(12, 4, generator=source), torch.randint(5, (12,), generator=source)
    mask = (torch.rand(12, generator=source) < 0.6).float()
    tokens = mask.sum()
    dist.all_reduce(tokens)
    each = nn.functional.cross_entropy(net(x), wanted, reduction="none")
    loss = (each * mask).sum() / tokens
    optimizer.zero_grad()
    loss.backward()  # here LS206
    optimizer.step()
