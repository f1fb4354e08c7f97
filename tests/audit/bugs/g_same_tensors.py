# SPDX-License-Identifier: Apache-2.0
"""G: batches are cut by hand, and every rank cuts the same ones."""

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


source = torch.Generator().manual_seed(1)
data, classes = torch.randn(48, 4, generator=source), torch.arange(48) % 2
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    rows = slice(6 * step, 6 * step + 6)
    optimizer.zero_grad()
    out = model(data[rows])  # here LS508
    nn.functional.cross_entropy(out, classes[rows]).backward()
    optimizer.step()
