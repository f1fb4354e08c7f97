# SPDX-License-Identifier: Apache-2.0
"""Keys of a momentum encoder, gathered without gradient into a queue."""

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


keys_of = copy.deepcopy(net).requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
queue = nn.functional.normalize(torch.randn(16, 2), dim=1)
for step in range(4):
    x, _ = batch(step)
    query = nn.functional.normalize(model(x), dim=1)
    with torch.no_grad():
        for slow, fast in zip(keys_of.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
        keys = nn.functional.normalize(keys_of(x + 0.1), dim=1)
        rows = [torch.empty_like(keys) for _ in range(world)]
        dist.all_gather(rows, keys)
    positive = (query * keys).sum(1, keepdim=True)
    scores = torch.cat([positive, query @ queue.T], dim=1) / 0.2
    optimizer.zero_grad()
    nn.functional.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long)).backward()
    optimizer.step()
    queue = torch.cat([*rows, queue])[:16]
