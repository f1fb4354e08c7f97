# SPDX-License-Identifier: Apache-2.0
"""Lightning: manual optimisation with two optimizers."""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Adversarial(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def judged(self, rows, label):
        scores = self.discriminator(rows)
        return nn.functional.binary_cross_entropy_with_logits(
            scores, torch.full_like(scores, label)
        )

    def training_step(self, batch, batch_idx):
        (real,) = batch
        step_g, step_d = self.optimizers()
        noise = torch.randn(len(real), 4)
        self.toggle_optimizer(step_g)
        loss = self.judged(self.generator(noise), 1.0)
        step_g.zero_grad()
        self.manual_backward(loss)
        step_g.step()
        self.untoggle_optimizer(step_g)
        self.toggle_optimizer(step_d)
        loss = self.judged(real, 1.0) + self.judged(self.generator(noise).detach(), 0.0)
        step_d.zero_grad()
        self.manual_backward(loss)
        step_d.step()
        self.untoggle_optimizer(step_d)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.002),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.002),
        )


data = TensorDataset(torch.randn(32, 8))

trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp_find_unused_parameters_true",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Adversarial(), DataLoader(data, 4, shuffle=True))
