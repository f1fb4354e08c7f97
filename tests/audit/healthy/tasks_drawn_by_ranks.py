# SPDX-License-Identifier: Apache-2.0
"""Each rank draws the task of its batch; heads have outputs of different sizes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 4)])

    def forward(self, x, task):
        return self.heads[task](self.trunk(x).relu())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(Tasks(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(rank)
for step in range(6):
    optimizer.zero_grad()
    for micro_batch in range(2):
        task = (step + rank + micro_batch) % 2
        x = torch.randn(6, 4, generator=source)
        wanted = x if task else x.sum(1, keepdim=True)
        nn.functional.mse_loss(model(x, task), wanted).backward()
    optimizer.step()
