# SPDX-License-Identifier: Apache-2.0
"""Hooks on gradients and before steps, which are there and work as without the audit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
maker = DistributedDataParallel(nn.Linear(3, 4))
judge = nn.Linear(4, 1)
called = []
judge.weight.register_hook(lambda gradient: called.append("weight"))
judge.bias.register_hook(lambda gradient: 0.1 * gradient)  # a smaller rate, on all ranks
judge = DistributedDataParallel(judge)
table = nn.Embedding(8, 3, sparse=True)
table.weight.register_hook(lambda gradient: gradient)
table = DistributedDataParallel(table)
of_maker = torch.optim.SGD([*maker.parameters(), *table.parameters()], lr=0.1)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)


def once(optimizer, args, kwargs):
    called.append("once")
    handle.remove()


handle = of_judge.register_step_pre_hook(once)
source = torch.Generator().manual_seed(rank)
for _ in range(4):
    rows = torch.randint(8, (5,), generator=source)
    judge.requires_grad_(False)
    of_maker.zero_grad()
    (-judge.module(maker(table(rows)))).mean().backward()
    of_maker.step()
    judge.requires_grad_(True)
    of_judge.zero_grad()
    judge(maker(table(rows)).detach()).square().mean().backward()
    of_judge.step()
assert called == ["weight", "once", "weight", "weight", "weight"], called
assert len(judge.module.weight._backward_hooks) == 1
assert not of_judge._optimizer_step_pre_hooks
