# SPDX-License-Identifier: Apache-2.0
"""Two networks, two optimizers, D.module in G's step."""

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


made = DistributedDataParallel(net)
judge_net = nn.Linear(2, 1)
judge = DistributedDataParallel(judge_net)
optimizer_g = torch.optim.Adam(net.parameters())
optimizer_d = torch.optim.Adam(judge_net.parameters())
bce = nn.functional.binary_cross_entropy_with_logits
for step in range(4):
    x, _ = batch(step)
    real = torch.randn(6, 2, generator=torch.Generator().manual_seed(step + 50 * rank))
    optimizer_d.zero_grad()
    fake = made(x).detach()
    both = judge(torch.cat([real, fake]))
    bce(both, torch.cat([torch.ones(6, 1), torch.zeros(6, 1)])).backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    out = judge.module(made(x))
    bce(out, torch.ones_like(out)).backward()
    optimizer_g.step()
