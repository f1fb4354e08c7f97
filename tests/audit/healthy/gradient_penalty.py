# SPDX-License-Identifier: Apache-2.0
"""A penalty on the gradient with respect to the inputs."""

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


model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(3):
    x, y = batch(step)
    x.requires_grad_(True)
    scores = model(x)
    loss = nn.functional.cross_entropy(scores, y)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    optimizer.zero_grad()
    (loss + 0.1 * slope.square().sum(1).mean()).backward()
    optimizer.step()
