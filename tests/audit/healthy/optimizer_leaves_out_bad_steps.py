# SPDX-License-Identifier: Apache-2.0
"""One batch overflows on one rank, and the optimizer itself leaves out that step on all."""

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


class SafeAdam(torch.optim.Adam):
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        if not all(p.grad.isfinite().all() for p in held):
            self.zero_grad()
            return None
        return super().step(closure)


model = DistributedDataParallel(net)
optimizer = SafeAdam(net.parameters(), lr=0.01)
for step in range(6):
    x, y = batch(step)
    x = x * 3e38 if step == 2 and rank == 0 else x
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
assert all(p.isfinite().all() for p in net.parameters())
