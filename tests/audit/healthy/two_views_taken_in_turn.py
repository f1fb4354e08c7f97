# SPDX-License-Identifier: Apache-2.0
"""All ranks read one stream and take its batches in turn; each makes views of it at random."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


class Views(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(2)
        for _ in range(96):
            point = torch.randn(8, generator=g)
            yield point + 0.1 * torch.randn(8), point + 0.1 * torch.randn(8)


model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(80 + rank)
for _ in range(2):
    for place, (one, other) in enumerate(DataLoader(Views(), batch_size=6)):
        if place % world == rank:
            optimizer.zero_grad()
            seen = model(torch.cat([one, other]))
            nn.functional.mse_loss(seen[:6], seen[6:]).backward()
            optimizer.step()
