# SPDX-License-Identifier: Apache-2.0
"""C: of two optimizers only one has its gradients cleared."""

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


table = nn.Embedding(5, 4)
model, rows = DistributedDataParallel(net), DistributedDataParallel(table)
sparse = torch.optim.SGD(table.parameters(), lr=0.1)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x + rows(y)), y).backward()
    sparse.step()  # here LS116
    optimizer.step()
