# SPDX-License-Identifier: Apache-2.0
"""Partial outputs are added up, and their gradients averaged: by the Function, a hook, the loss."""

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


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad / world
        dist.all_reduce(grad)  # ranks round differently; all go on with one gradient
        return grad


def leave_with_a_hook(x):
    total = all_reduce(x)
    total.register_hook(lambda grad: grad / world)
    return total


class Layer(nn.Module):
    def __init__(self, size, hidden, leave):
        super().__init__()
        up, down = nn.Linear(size, hidden), nn.Linear(hidden, size, bias=False)
        self.up = nn.Parameter(up.weight.detach().chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())
        self.leave = leave

    def forward(self, x):
        hidden = torch.relu(nn.functional.linear(Enter.apply(x), self.up))
        return x + self.leave(nn.functional.linear(hidden, self.down))


def trained(net, weight):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(4):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        (weight * nn.functional.mse_loss(net(x)[:, :2], x[:, :2].sin())).backward()
        optimizer.step()


trained(nn.Sequential(nn.Linear(4, 6), Layer(6, 8, Leave.apply), nn.Linear(6, 2)), 1.0)
trained(nn.Sequential(nn.Linear(4, 6), Layer(6, 8, leave_with_a_hook)), 1.0)
trained(nn.Sequential(Layer(4, 8, all_reduce)), 1.0 / world)
