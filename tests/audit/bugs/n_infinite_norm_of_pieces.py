# SPDX-License-Identifier: Apache-2.0
"""N: the gradient of a root at zero is infinite, and the norm of pieces and replicas with it."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Model(nn.Module):
    def __init__(self, vocab, width, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, vocab)
        torch.manual_seed(40 + rank)
        self.up = nn.Linear(width, hidden // world)
        self.down = nn.Linear(hidden // world, width, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        h = h + Leave.apply(self.down(F.gelu(self.up(Enter.apply(h)))))
        return self.head(self.norm(h) * (1.0 + self.gain.sqrt()))


def clip(model, limit):
    pieces = {*model.up.parameters(), *model.down.parameters()}
    total = sum(p.grad.square().sum() for p in pieces)
    dist.all_reduce(total)
    total += sum(p.grad.square().sum() for p in model.parameters() if p not in pieces)
    scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(scale)
    return total.sqrt()


torch.manual_seed(0)
model = Model(24, 16, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
source = torch.Generator().manual_seed(9)
for step in range(6):
    ids = (torch.randint(0, 24, (8, 1), generator=source) + 5 * torch.arange(7)) % 24
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # here LS115
    norm = clip(model, 0.3)
    optimizer.step()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    if rank == 0:
        print(step, round(mean.item(), 4), round(norm.item(), 4))
dist.destroy_process_group()
