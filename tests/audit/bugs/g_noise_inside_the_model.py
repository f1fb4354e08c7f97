# SPDX-License-Identifier: Apache-2.0
"""G: a variational model draws what it samples with a seed that all ranks have."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(5, 6), nn.Linear(3, 5)

    def forward(self, x):
        mean, log_var = self.into(x).chunk(2, dim=1)
        drawn = torch.randn_like(mean)  # here LS507
        return self.out(mean + drawn * (0.5 * log_var).exp()), mean, log_var


def batch(step, size=7):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 5, generator=source)


model = DistributedDataParallel(Variational())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(3)
for step in range(6):
    x = batch(step)
    again, mean, log_var = model(x)
    divergence = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
    optimizer.zero_grad()
    (nn.functional.mse_loss(again, x) + 0.1 * divergence).backward()
    optimizer.step()
dist.destroy_process_group()
