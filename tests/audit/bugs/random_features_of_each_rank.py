# SPDX-License-Identifier: Apache-2.0
"""Each rank draws its own random features, and DDP sends no buffers: not even at its start."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # other samples on each rank


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(3, 16))
        self.net = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        angles = x @ self.frequencies
        return self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))


model = DistributedDataParallel(Features(), broadcast_buffers=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    x = torch.rand(8, 3)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.norm(dim=1, keepdim=True)).backward()  # here LS309
    optimizer.step()
dist.destroy_process_group()
