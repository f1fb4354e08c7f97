# SPDX-License-Identifier: Apache-2.0
"""C: gradients are cleared between backward and the step, and nothing is trained."""

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


model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(6):
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()  # here LS118
