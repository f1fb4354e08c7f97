# SPDX-License-Identifier: Apache-2.0
"""Fabric: set up model, optimizer and loaders, backward through Fabric."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(3)
data = TensorDataset(torch.randn(48, 8), torch.randint(2, (48,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"loss {mean:.3f}")
