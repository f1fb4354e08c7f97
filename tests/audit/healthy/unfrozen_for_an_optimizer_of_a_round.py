# SPDX-License-Identifier: Apache-2.0
"""In some steps an optimizer that is gone afterwards trains the part that is frozen at first."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


net[0].requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    if step == 2:
        net[0].requires_grad_(True)
        model = DistributedDataParallel(net)
    nn.functional.cross_entropy(model(x), y).backward()
    if step > 1:
        torch.optim.SGD(net[0].parameters(), lr=0.1).step()
    optimizer.step()
