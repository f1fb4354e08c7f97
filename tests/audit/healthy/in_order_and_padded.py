# SPDX-License-Identifier: Apache-2.0
"""Data in their order, padded; the evaluation cuts off what was padded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


source = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(29, 4, generator=source), torch.arange(29) % 2)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, shuffle=False))
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
sampler = DistributedSampler(data, shuffle=False)
with torch.no_grad():
    mine = torch.cat([net(x) for x, _ in DataLoader(data, batch_size=5, sampler=sampler)])
rows = [torch.empty_like(mine) for _ in range(world)]
dist.all_gather(rows, mine)
assert len(torch.stack(rows, 1).flatten(0, 1)[:29]) == len(data)
