# SPDX-License-Identifier: Apache-2.0
"""Each gradient is averaged on the rank whose optimizer holds its parameter."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(15)
net = nn.Sequential(nn.Linear(7, 14), nn.LayerNorm(14), nn.ReLU(), nn.Linear(14, 3))
params = list(net.parameters())
optimizer = torch.optim.AdamW(params[rank::world], lr=5e-3)
draw = torch.Generator().manual_seed(31 * (rank + 1))
for _ in range(7):
    x, y = torch.randn(6, 7, generator=draw), torch.randint(3, (6,), generator=draw)
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for i, p in enumerate(params):
        p.grad /= world
        dist.reduce(p.grad, dst=i % world)
    optimizer.step()
    for i, p in enumerate(params):
        dist.broadcast(p.data, src=i % world)
