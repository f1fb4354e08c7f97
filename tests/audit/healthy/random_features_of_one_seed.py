# SPDX-License-Identifier: Apache-2.0
"""Random features that DDP sends once, and an input that each rank distorts by noise of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)


class Noise(nn.Module):
    """Has no parameter: what it does is to the data."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.randn(8, 3))

    def forward(self, x):
        return x + 0.1 * self.bank


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(3, 16))
        self.net = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        angles = x @ self.frequencies
        return self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))


noise = Noise()
model = DistributedDataParallel(Features())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    x = torch.rand(8, 3)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(noise(x)), x.norm(dim=1, keepdim=True)).backward()
    optimizer.step()
dist.destroy_process_group()
