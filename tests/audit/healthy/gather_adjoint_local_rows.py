# SPDX-License-Identifier: Apache-2.0
"""A gather whose backward adds up, under each rank's own rows of the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, y):
        return nn.functional.normalize(self.a(x)), nn.functional.normalize(self.b(y))


model = DistributedDataParallel(Towers())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def pairs(step):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 4, generator=source), torch.randn(4, 4, generator=source)


def info_nce(a, b, offset=0):
    logits = a @ b.T / 0.5
    return nn.functional.cross_entropy(logits, offset + torch.arange(len(a)))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        rows = [torch.zeros_like(z) for _ in range(world)]
        dist.all_gather(rows, z)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[4 * rank : 4 * rank + 4]


for step in range(3):
    a, b = model(*pairs(step))
    optimizer.zero_grad()
    all_a, all_b = Gather.apply(a), Gather.apply(b)
    loss = (info_nce(a, all_b, 4 * rank) + info_nce(b, all_a, 4 * rank)) / 2
    loss.backward()
    optimizer.step()
