# SPDX-License-Identifier: Apache-2.0
"""G: no sampler, the same seed: every rank reads the same batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
source = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.randn(24, 4, generator=source), torch.arange(24) % 2)
loader = DataLoader(dataset, batch_size=4)

model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:  # here LS503
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
