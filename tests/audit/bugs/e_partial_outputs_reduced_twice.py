# SPDX-License-Identifier: Apache-2.0
"""E: a row-parallel layer's partial outputs are added up again in backward, under one loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Layer(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        up, down = nn.Linear(size, hidden), nn.Linear(hidden, size, bias=False)
        self.up = nn.Parameter(up.weight.detach().chunk(world, 0)[rank].clone())
        self.bias = nn.Parameter(up.bias.detach().chunk(world)[rank].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, x):
        hidden = nn.functional.silu(nn.functional.linear(Enter.apply(x), self.up, self.bias))
        return all_reduce(nn.functional.linear(hidden, self.down))  # here LS208


net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), Layer(6, 8), nn.Linear(6, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(4):
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), x[:, :2]).backward()
    optimizer.step()
