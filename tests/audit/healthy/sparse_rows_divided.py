# SPDX-License-Identifier: Apache-2.0
"""Gathered rows of a sparse gradient are added up and divided by the ranks, as dense ones are."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
table, head = nn.EmbeddingBag(300, 8, mode="mean", sparse=True), nn.Linear(8, 3)
params = [*table.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    rows = torch.randint(300, (6, 5), generator=source)
    wanted = torch.randint(3, (6,), generator=source)
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(table(rows)), wanted).backward()
    for p in params:
        if p.grad.is_sparse:
            own = p.grad._indices().contiguous(), p.grad._values() / world
            places, values = ([torch.empty_like(t) for _ in range(world)] for t in own)
            dist.all_gather(places, own[0])
            dist.all_gather(values, own[1])
            p.grad = torch.sparse_coo_tensor(torch.cat(places, 1), torch.cat(values), p.shape)
        else:
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
