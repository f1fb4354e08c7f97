# SPDX-License-Identifier: Apache-2.0
"""E: a score for each sample is gathered detached, put back and joined in one line."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(9 + rank)


def of_all_ranks(vector):
    parts = [torch.empty_like(vector) for _ in range(world)]
    dist.all_gather(parts, vector.detach())  # here LS207
    parts[rank] = vector
    return parts


for _ in range(5):
    x = torch.randn(8, 5, generator=draw)
    lengths = x.sum(1).exp()
    score = model(x).squeeze(1)
    others = torch.cat(of_all_ranks(score))
    longer = torch.cat(of_all_ranks(lengths))[None, :] >= lengths[:, None]
    at_risk = others.expand(len(x), -1).masked_fill(~longer, float("-inf"))
    loss = (at_risk.logsumexp(1) - score).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
