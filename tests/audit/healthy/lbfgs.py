# SPDX-License-Identifier: Apache-2.0
"""LBFGS with its closure."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
inner = torch.optim.LBFGS(net.parameters(), max_iter=2)


class Stepper:
    def zero_grad(self):
        self.run = inner.zero_grad

    def step(self):
        def closure():
            inner.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            return shared / world

        inner.step(closure)


optimizer = Stepper()

for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    optimizer.step()
