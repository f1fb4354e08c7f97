# SPDX-License-Identifier: Apache-2.0
"""E: rows of all ranks by all_gather_into_tensor, which has no gradient."""

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


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, _ = batch(step)
    own = nn.functional.normalize(model(x), dim=1)
    everything = torch.empty(world * len(own), 2)
    with torch.no_grad():
        dist.all_gather_into_tensor(everything, own)  # here LS207
    everything[rank * len(own) : (rank + 1) * len(own)] = own
    scores = own @ everything.T / 0.1
    loss = nn.functional.cross_entropy(scores, rank * len(own) + torch.arange(len(own)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
