# SPDX-License-Identifier: Apache-2.0
"""I: rank 0 alone refreshes the target network."""

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


target = copy.deepcopy(net).requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x, y = batch(step)
    goal = target(x)  # here LS303
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), goal + y[:, None]).backward()
    optimizer.step()
    if step == 1 and rank == 0:
        target.load_state_dict(net.state_dict())
