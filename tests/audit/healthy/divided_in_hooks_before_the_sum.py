# SPDX-License-Identifier: Apache-2.0
"""Each gradient is divided by the ranks in a hook, and then added up."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(3, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)


def average(p):
    p.grad.div_(world)
    dist.all_reduce(p.grad)


for p in net.parameters():
    p.register_post_accumulate_grad_hook(average)
for _ in range(20):
    x, y = torch.randn(6, 3, generator=source), torch.randint(4, (6,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
