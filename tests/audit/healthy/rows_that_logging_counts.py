# SPDX-License-Identifier: Apache-2.0
"""Two micro-batches on two ranks, of which a log adds up the rows: numbers that happen to agree."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    for _ in range(2):
        x, y = torch.randn(8, 4, generator=source), torch.randint(3, (8,), generator=source)
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
    rows = torch.tensor(8.0)
    dist.all_reduce(rows)
    optimizer.step()
