# SPDX-License-Identifier: Apache-2.0
"""Reduced after each micro-batch: divided before, after, or gathered elsewhere; flat and singly."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def singly_divided_before(net):
    for p in net.parameters():
        p.grad.div_(world)
        dist.all_reduce(p.grad)


def singly_divided_after(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world)


def flat_divided(net, before):
    gradients = [p.grad for p in net.parameters()]
    flat = torch.cat([g.flatten() for g in gradients]) / (world if before else 1)
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat / (1 if before else world), gradients)


def moved_away(net):
    """Into a buffer, and back after the last micro-batch."""
    for p in net.parameters():
        dist.all_reduce(p.grad)
        gathered = p.grad / world + getattr(p, "gathered", 0.0)
        p.gathered, p.grad = gathered, None


def brought_back(net):
    for p in net.parameters():
        p.grad = p.gathered
        del p.gathered


def train(reduce, finish=lambda net: None, micro_batches=3):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(6, 5, generator=source)
            loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
            (loss / micro_batches).backward()
            reduce(net)
        finish(net)
        optimizer.step()


train(singly_divided_before)
train(singly_divided_after)
train(lambda net: flat_divided(net, before=True))
train(lambda net: flat_divided(net, before=False))
train(moved_away, brought_back)
dist.destroy_process_group()
