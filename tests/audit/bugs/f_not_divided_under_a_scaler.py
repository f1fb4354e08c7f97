# SPDX-License-Identifier: Apache-2.0
"""F: gradients of scaled losses are added up by hand and not divided."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)  # here LS205
    scaler.step(optimizer)
    scaler.update()
