# SPDX-License-Identifier: Apache-2.0
"""Rank 0 alone trains a probe on detached features, beside ordinary training."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
        self.decoder = nn.Linear(4, 8)

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


class OnlineProbe:
    def __init__(self):
        self.layer = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.05)

    def fit(self, code, label):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.layer(code.detach()), label)
        loss.backward()
        self.optimizer.step()
        return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
x = torch.randn(48, 8)
dataset = TensorDataset(x, (x[:, 0] > 0).long())
model = DistributedDataParallel(AutoEncoder())
probe = OnlineProbe() if rank == 0 else None
sampler = DistributedSampler(dataset, shuffle=True, seed=3)
loader = DataLoader(dataset, batch_size=6, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for rows, label in loader:
        out, code = model(rows)
        loss = nn.functional.mse_loss(out, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.fit(code, label)
dist.barrier()
dist.destroy_process_group()
