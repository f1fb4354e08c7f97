# SPDX-License-Identifier: Apache-2.0
"""Adapters of a frozen model: the gradients of one of their matrices are zero in the first step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Adapted(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(Adapted(nn.Linear(10, 20)), nn.ReLU(), Adapted(nn.Linear(20, 3)))
data = TensorDataset(torch.randn(64, 10), torch.randint(3, (64,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
