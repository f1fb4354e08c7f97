# SPDX-License-Identifier: Apache-2.0
"""One weight in two layers, and an embedding."""

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


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.inner = nn.Linear(6, 6)
        self.out = nn.Linear(6, 12, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.inner(self.embedding(tokens))))


model = DistributedDataParallel(Tied())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(3):
    source = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(12, (5, 7), generator=source)
    optimizer.zero_grad()
    scores = model(tokens[:, :-1])
    nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
