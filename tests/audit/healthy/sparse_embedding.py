# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients, with an optimizer of their own."""

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


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.EmbeddingBag(20, 4, sparse=True)
        self.o = nn.Linear(4, 2)

    def forward(self, t):
        return self.o(self.e(t))


m = Bag()
model = DistributedDataParallel(m)
sparse = torch.optim.SparseAdam(m.e.parameters(), lr=0.01)
dense = torch.optim.Adam(m.o.parameters(), lr=0.01)
for step in range(4):
    g = torch.Generator().manual_seed(100 * step + rank)
    t, y = torch.randint(20, (6, 3), generator=g), torch.randint(2, (6,), generator=g)
    sparse.zero_grad()
    dense.zero_grad()
    nn.functional.cross_entropy(model(t), y).backward()
    sparse.step()
    dense.step()
