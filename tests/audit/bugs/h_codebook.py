# SPDX-License-Identifier: Apache-2.0
"""H: a codebook in a buffer follows each rank's own batches."""

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


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
        self.register_buffer("codebook", torch.zeros(2))

    def forward(self, x):
        z = self.net(x)
        if self.training:
            self.codebook = 0.9 * self.codebook + 0.1 * z.detach().mean(0)
        return z - self.codebook


model = DistributedDataParallel(Quantised(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # here LS309
    optimizer.step()
model.eval()
with torch.no_grad():
    model(batch(0)[0])
