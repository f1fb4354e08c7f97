# SPDX-License-Identifier: Apache-2.0
"""Fabric: no_backward_sync for all but the last micro-batch."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(4)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
for iteration, (x, y) in enumerate(loader):
    is_accumulating = (iteration + 1) % 4 != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss / 4)
    if not is_accumulating:
        optimizer.step()
        optimizer.zero_grad()
