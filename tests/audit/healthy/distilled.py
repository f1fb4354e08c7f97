# SPDX-License-Identifier: Apache-2.0
"""A frozen teacher on every rank."""

import copy

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


teacher = copy.deepcopy(net).eval().requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(3):
    x, y = batch(step)
    with torch.no_grad():
        soft = torch.softmax(teacher(x) / 2, 1)
    scores = model(x)
    hard = nn.functional.cross_entropy(scores, y)
    close = nn.functional.kl_div(torch.log_softmax(scores / 2, 1), soft, reduction="batchmean")
    optimizer.zero_grad()
    (0.5 * hard + 0.5 * 4 * close).backward()
    optimizer.step()
