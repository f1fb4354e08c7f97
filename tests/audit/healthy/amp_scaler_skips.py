# SPDX-License-Identifier: Apache-2.0
"""The first scale is too large: a GradScaler leaves out steps until it fits."""

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
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
before = [p.detach().clone() for p in net.parameters()]
skipped = 0
for step in range(12):
    x, y = batch(step)
    optimizer.zero_grad()
    scaler.scale(1000 * nn.functional.cross_entropy(model(x), y)).backward()
    skipped += not all(p.grad.isfinite().all() for p in net.parameters())
    scaler.step(optimizer)
    scaler.update()
assert skipped
assert all(
    p.isfinite().all() and not p.equal(b) for p, b in zip(net.parameters(), before, strict=True)
)
