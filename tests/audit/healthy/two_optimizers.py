# SPDX-License-Identifier: Apache-2.0
"""Weights and biases in optimizers of their own, with a warm-up."""

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
weights = torch.optim.SGD([p for p in net.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
biases = torch.optim.Adam([p for p in net.parameters() if p.dim() == 1], lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(weights, max_lr=0.2, total_steps=5)
for step in range(5):
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    weights.zero_grad()
    biases.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    weights.step()
    biases.step()
    schedule.step()
