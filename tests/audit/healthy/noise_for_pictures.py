# SPDX-License-Identifier: Apache-2.0
"""A model is evaluated, and draws pictures, under the same noise on all ranks as it trains."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + rank)
held_out = torch.randn(6, 4)
for step in range(6):
    x, noise = torch.randn(6, 4), torch.randn(6, 4)
    optimizer.zero_grad()
    (model(x + noise) - noise).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        net(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
    model.eval()
    added = torch.randn(held_out.shape, generator=torch.Generator().manual_seed(step))
    print((net(held_out + added) - added).square().mean().item())
    model.train()
dist.destroy_process_group()
