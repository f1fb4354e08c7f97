# SPDX-License-Identifier: Apache-2.0
"""Clipping finds nothing of what is frozen, or has no parameters, or is left out of a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


other, none = nn.Linear(4, 2), nn.ReLU()
net[0].requires_grad_(False)
model, second = DistributedDataParallel(net), DistributedDataParallel(other)
optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    if step == 2:
        loss = loss + nn.functional.cross_entropy(second(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(net[0].parameters(), 0.05)
    nn.utils.clip_grad_norm_(none.parameters(), 0.05)
    if step > 3:
        nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    optimizer.step()
