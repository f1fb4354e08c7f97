# SPDX-License-Identifier: Apache-2.0
"""Embeddings first without gradient, then again with the gradient of the whole loss."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, _ = batch(step, size=8)
    with torch.no_grad():
        cached = torch.cat([model(part) for part in x.split(4)])
    leaves = cached.requires_grad_()
    scores = leaves @ leaves.T / 0.5
    nn.functional.cross_entropy(scores, torch.arange(8)).backward()
    optimizer.zero_grad()
    surrogates = [
        (model(part) * g).sum() for part, g in zip(x.split(4), leaves.grad.split(4), strict=True)
    ]
    sum(surrogates).backward()
    optimizer.step()
