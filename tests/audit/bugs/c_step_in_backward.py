# SPDX-License-Identifier: Apache-2.0
"""C: optimizers step inside backward, before the reduction."""

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


optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}


def step_now(p):
    optimizers[p].step()  # here LS101
    optimizers[p].zero_grad()


model = DistributedDataParallel(net)
for p in net.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for step in range(2):
    x, y = batch(step)
    nn.functional.cross_entropy(model.module(x), y).backward()
