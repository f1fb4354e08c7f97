# SPDX-License-Identifier: Apache-2.0
"""C: gradients are cleared before each micro-batch, so that a step uses the last one alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
accumulate = 4


def batch(number, size=6):
    source = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for number in range(6 * accumulate):
    x, y = batch(number)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y) / accumulate
    loss.backward()  # here LS118
    if (number + 1) % accumulate == 0:
        optimizer.step()
