# SPDX-License-Identifier: Apache-2.0
"""An expert on each rank, to which uneven numbers of tokens travel and come back."""

import torch
import torch.distributed as dist
from torch import nn


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class Layer(nn.Module):
    def __init__(self, dim, world, rank):
        super().__init__()
        self.world = world
        self.trunk = nn.Linear(dim, dim)
        self.router = nn.Linear(dim, world, bias=False)
        self.head = nn.Linear(dim, 2)
        torch.manual_seed(100 + rank)
        self.expert = nn.Sequential(nn.Linear(dim, 12), nn.ReLU(), nn.Linear(12, dim))

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        weight, choice = self.router(h).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        send = torch.bincount(choice, minlength=self.world)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        send, receive = send.tolist(), receive.tolist()
        there = self.expert(Exchange.apply(h[order], send, receive))
        back = Exchange.apply(there, receive, send)
        mixed = back[order.argsort()] * weight[:, None]
        return self.head(h + mixed)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
layer = Layer(6, world, rank)
experts = list(layer.expert.parameters())
shared = [p for n, p in layer.named_parameters() if not n.startswith("expert.")]
optimizer = torch.optim.Adam([{"params": shared}, {"params": experts, "lr": 2e-3}], lr=1e-3)
data = torch.Generator().manual_seed(500 + rank)
for _ in range(5):
    x = torch.randn(32, 6, generator=data)
    y = (x[:, 0] * x[:, 1] > 0).long()
    optimizer.zero_grad()
    nn.functional.cross_entropy(layer(x), y).backward()
    for p in shared:
        dist.all_reduce(p.grad)
    for p in shared + experts:
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
