# SPDX-License-Identifier: Apache-2.0
"""Training batches are made by hand, and all ranks evaluate on what a loader reads, or begins."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
checked = torch.randn(40, 4)
checks = DataLoader(TensorDataset(checked, (checked.sum(1) > 0).long()), batch_size=8)
source = torch.Generator().manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate(batches):
    model.eval()
    for number, (x, y) in enumerate(checks):
        if number == batches:
            break
        with torch.no_grad():
            nn.functional.cross_entropy(model.module(x), y)
    model.train()


for epoch in range(4):
    evaluate(2 if epoch == 1 else len(checks))
    for _ in range(3):
        x = torch.randn(8, 4, generator=source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()
