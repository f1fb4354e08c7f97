# SPDX-License-Identifier: Apache-2.0
"""LightningModules of these tests, and the same training by Lightning's own trainer."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, GLOBAL_BATCH = 44, 8
"""Not a multiple: the last global batch of an epoch has 4 samples."""
STEPS = -(-SAMPLES // GLOBAL_BATCH)
"""Global batches in an epoch."""


def problem():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    targets = (features[:, 0] > features[:, 1]).long()
    return TensorDataset(features, targets)


def loader(batch_size=GLOBAL_BATCH):
    return DataLoader(problem(), batch_size=batch_size)


class Classifier(lightning.LightningModule):
    """Leaves to its subclasses what they are about."""

    def __init__(self, width=7, lr=0.3):
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(11)
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2)).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, features):
        return self.layers(features)

    def training_step(self, batch, batch_idx):
        features, target = batch
        loss = nn.functional.cross_entropy(self(features), target)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        features, target = batch
        self.log("val_loss", nn.functional.cross_entropy(self(features), target))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def by_lightning(module, *, max_epochs=3, validates=True, train=None, **arguments):
    """`module` as Lightning's own trainer leaves it, and that trainer."""
    trainer = lightning.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )
    train = loader() if train is None else train
    trainer.fit(module, train, loader() if validates else None)
    return module, trainer


def farthest(model, other):
    """The largest difference between two models' weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
