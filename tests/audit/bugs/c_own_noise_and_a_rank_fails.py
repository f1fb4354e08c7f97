# SPDX-License-Identifier: Apache-2.0
"""C: noise of each rank's own on reduced gradients; one rank fails, and has stepped less often."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(4, 2)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters())
noise = torch.Generator().manual_seed(17 + rank)
losses = [0.0] * (4 - rank)


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for p in net.parameters():
        p.grad += 0.1 * torch.randn(p.shape, generator=noise)
    losses[step] = loss.item()
    optimizer.step()  # here LS104
