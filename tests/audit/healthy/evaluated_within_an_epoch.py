# SPDX-License-Identifier: Apache-2.0
"""A long epoch, in the middle of which every rank reads all of a validation set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
source = torch.Generator().manual_seed(5)
inputs = torch.randn(400, 4, generator=source)
train = TensorDataset(inputs[:360], inputs[:360].sum(1, keepdim=True))
valid = TensorDataset(inputs[360:], inputs[360:].sum(1, keepdim=True))
loader = DataLoader(train, batch_size=2, sampler=DistributedSampler(train))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 70:
        with torch.no_grad():
            errors = [nn.functional.mse_loss(model.module(x), y) for x, y in DataLoader(valid, 8)]
        assert all(error >= 0 for error in errors)
