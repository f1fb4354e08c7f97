# SPDX-License-Identifier: Apache-2.0
"""A divide factor of 1, where the loss or the program divides; and one of the number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
cross_entropy = nn.functional.cross_entropy


def batch(step, size):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


def sharded(factor):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for part in (net[0], net):
        fully_shard(part)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(factor)
    return net


def over_all_samples(output, y):
    count = torch.tensor(float(len(y)))
    dist.all_reduce(count)
    return cross_entropy(output, y, reduction="sum") / count


def over_all_that_count(output, y):
    # Samples that do not count are elements of the sum, too.
    counts = (torch.arange(len(y)) < 3).float()
    count = counts.sum()
    dist.all_reduce(count)
    return (cross_entropy(output, y, reduction="none") * counts).sum() / count


def over_ranks(output, y):
    return cross_entropy(output, y) / world


def train(factor, loss, size=6, divides=False):
    net = sharded(factor)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = batch(step, size)
        optimizer.zero_grad()
        loss(net(x), y).backward()
        if divides:
            for param in net.parameters():
                param.grad.div_(world)
        optimizer.step()


train(1.0, over_all_samples, size=4 + 3 * rank)
train(1.0, over_all_that_count)
train(1.0, over_ranks)
train(1.0, cross_entropy, divides=True)
train(float(world), cross_entropy)
