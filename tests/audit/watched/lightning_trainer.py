# SPDX-License-Identifier: Apache-2.0
"""`LightningWatch` in Lightning's Trainer; wrong: a parameter that the wrapper does not know."""

import logging
import warnings

import lightning
import torch
from _tried import try_out
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.integrations.lightning_watch import LightningWatch

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Net(lightning.LightningModule):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if self.how == "raises" and batch_idx == 2:
            raise KeyError("no such row")
        (features,) = batch
        answers = self.layers(features)[:, 0]
        if self.how == "wrong":
            answers = answers * self.scale
        return nn.functional.mse_loss(answers, features.sum(1))

    def configure_optimizers(self):
        if self.how == "wrong":
            self.scale = nn.Parameter(torch.ones(()))  # the wrapper has been made before
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(watch, how):
    torch.manual_seed(0)
    net = Net(how)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if watch is None else [watch],
    )
    trainer.fit(net, DataLoader(TensorDataset(FEATURES), batch_size=4))
    return net


try_out(train, LightningWatch)
