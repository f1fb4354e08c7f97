# SPDX-License-Identifier: Apache-2.0
"""Sums through `.data` and `.detach()`: for printing, of means, made up for, or of copies."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def covariance(z, mean_over_ranks):
    moment = z.T @ z / len(z)
    return (mean_over_ranks(moment) - torch.eye(z.shape[1])).square().sum()


def as_one_mean(moment):
    """Every rank's loss is the same, and the wrapper's mean that of what each one owes to it."""
    dist.all_reduce(moment.data, op=dist.ReduceOp.AVG)
    return moment


def divided_unseen(moment):
    dist.all_reduce(moment.data)
    moment.data /= world
    return moment


def as_sum(moment):
    dist.all_reduce(moment.data)
    return moment / world


def decorrelated(z, x):
    return covariance(z, as_one_mean) + 0.1 * covariance(z, divided_unseen)


def times_ranks(z, x):
    return world * covariance(z, as_sum)


def centred(z, x):
    """By a constant, made of a copy."""
    mean = z.mean(0).detach().clone()
    dist.all_reduce(mean)
    return (z - mean / world).square().mean() + nn.functional.mse_loss(z, x[:, :2])


def printed_of_each_row(z, x):
    losses = (z - x[:, :2]).square().mean(1)
    loss = losses.mean()
    dist.all_reduce(losses.detach())
    return loss


def printed_before(z, x):
    loss = nn.functional.mse_loss(z, x[:, :2])
    dist.all_reduce(loss.detach())
    return loss


def train(loss_of, micro_batches=1):
    torch.manual_seed(6)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        for place in range(micro_batches):
            x = torch.randn(6, 4, generator=source)
            with nullcontext() if place == micro_batches - 1 else model.no_sync():
                loss = loss_of(model(x), x)
                (loss / micro_batches).backward()
        dist.all_reduce(loss.data)
        optimizer.step()


for loss_of in (decorrelated, times_ranks, centred, printed_of_each_row, printed_before):
    train(loss_of)
train(printed_before, micro_batches=world)
dist.destroy_process_group()
