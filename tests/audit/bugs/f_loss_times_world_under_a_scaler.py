# SPDX-License-Identifier: Apache-2.0
"""F: a scaled loss is multiplied by the number of ranks, and the fused optimizer unscales."""

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


model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y) * world  # here LS206
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
