# SPDX-License-Identifier: Apache-2.0
"""A: the wrapper is made and kept, and the model is called, with scaling and autocast."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


wrapped = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)  # here LS101
        loss = nn.functional.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
