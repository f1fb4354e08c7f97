# SPDX-License-Identifier: Apache-2.0
"""F: the wrapper has averaged, and unscaled gradients are added up again before they are clipped.

The first batch overflows, and the scaler leaves out its step.
"""

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
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(4):
    x, y = batch(step)
    optimizer.zero_grad()
    largest = 3e38 if step == 0 else 1.0
    scaler.scale(nn.functional.cross_entropy(model(largest * x), y)).backward()
    scaler.unscale_(optimizer)
    for p in net.parameters():
        dist.all_reduce(p.grad)  # here LS204
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
