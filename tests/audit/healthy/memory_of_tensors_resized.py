# SPDX-License-Identifier: Apache-2.0
"""Draws, samples and inputs are kept in memory that is resized after each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.arange(48), torch.randn(48, 4, dtype=torch.float64))
places = torch.arange(40)
part = Subset(data, places)
net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.LazyLinear(1)).double()
net(torch.zeros(4, 2, dtype=torch.long))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(part)
torch.manual_seed(1 + dist.get_rank())
given = torch.empty(0, 2, dtype=torch.long)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ids, x in DataLoader(part, 4, sampler=sampler):
        noise = torch.randn(4, 4, dtype=torch.float64)
        codes = torch.randint(50, (4,))
        given.resize_(4, 2).copy_(torch.stack([ids, codes], 1))
        optimizer.zero_grad()
        (model(given) - (x + noise).sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        for held in (noise, codes, ids, x, given):
            held.untyped_storage().resize_(0)
        given.resize_(0, 2)
places.untyped_storage().resize_(0)
dist.destroy_process_group()
