# SPDX-License-Identifier: Apache-2.0
"""F: a divergence per batch element, over batches of unequal size."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, _ = batch(step, size=4 + 6 * rank)
    target = torch.softmax(x[:, :2], dim=1)
    optimizer.zero_grad()
    scores = torch.log_softmax(model(x), dim=1)
    loss = nn.functional.kl_div(scores, target, reduction="batchmean")
    loss.backward()  # here LS203
    optimizer.step()
