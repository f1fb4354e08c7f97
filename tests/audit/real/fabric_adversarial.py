# SPDX-License-Identifier: Apache-2.0
"""Fabric: two networks with an optimizer each, in turn."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true")
fabric.launch()
generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
step_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
step_d = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
generator, step_g = fabric.setup(generator, step_g)
discriminator, step_d = fabric.setup(discriminator, step_d)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4))
criterion = nn.BCEWithLogitsLoss()
for (real,) in loader:
    fake = generator(torch.randn(len(real), 4))
    step_d.zero_grad()
    for rows, label in ((real, 1.0), (fake.detach(), 0.0)):
        scores = discriminator(rows)
        fabric.backward(criterion(scores, torch.full_like(scores, label)))
    step_d.step()
    step_g.zero_grad()
    scores = discriminator(fake)
    fabric.backward(criterion(scores, torch.ones_like(scores)))
    step_g.step()
