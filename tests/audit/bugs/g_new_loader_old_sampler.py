# SPDX-License-Identifier: Apache-2.0
"""G: after two epochs the loader is made anew, and the old one's sampler is told of the epochs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler)
for epoch in range(6):
    if epoch == 2:
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
    sampler.set_epoch(epoch)
    for x, y in loader:  # here LS504
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
