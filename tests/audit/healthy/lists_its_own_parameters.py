# SPDX-License-Identifier: Apache-2.0
"""A module with the `named_parameters` of an older torch, and a copy of it that nobody wraps."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Linear):
    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Net(4, 1))
average = copy.deepcopy(model.module).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), model.module.parameters(), strict=True):
            kept.lerp_(p, 0.1)
dist.destroy_process_group()
