# SPDX-License-Identifier: Apache-2.0
"""A layer that ranks cut up by hand: its weights differ from the start, its biases are zeros."""

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Halves(nn.Module):
    def __init__(self, source):
        super().__init__()
        self.enter = nn.Parameter(torch.randn(WIDTH, 4, generator=source))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.leave = nn.Parameter(torch.randn(4, WIDTH, generator=source))

    def forward(self, x):
        hidden = nn.functional.linear(_Enter.apply(x), self.enter, self.bias)
        return _Leave.apply(nn.functional.linear(hidden.tanh(), self.leave))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Halves(torch.Generator().manual_seed(1 + dist.get_rank())))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(8):
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
