# SPDX-License-Identifier: Apache-2.0
"""RaySGD's Lightning example: a LightningModule for digits, trained as it is.

    python examples/raysgd/lightning_mnist.py --num-workers 2

Its steps return dicts, as Lightning's modules did then, and log nothing: each number in them is in
the result, as the mean over all samples. In the place of MNIST there are scikit-learn's digits of
8 x 8 pixels, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import log_softmax, nll_loss
from torch.utils.data import DataLoader, TensorDataset, random_split

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE


class LitMNIST(lightning.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer_1 = nn.Linear(64, 128)
        self.layer_2 = nn.Linear(128, 256)
        self.layer_3 = nn.Linear(256, 10)

    def forward(self, images):
        hidden = torch.relu(self.layer_1(images.flatten(1)))
        hidden = torch.relu(self.layer_2(hidden))
        return log_softmax(self.layer_3(hidden), dim=1)

    def training_step(self, batch, batch_idx):
        images, target = batch
        output = self(images)
        hits = (output.argmax(dim=1) == target).float().mean()
        return {"loss": nll_loss(output, target), "train_accuracy": hits}

    def validation_step(self, batch, batch_idx):
        images, target = batch
        output = self(images)
        hits = (output.argmax(dim=1) == target).float().mean()
        return {"val_loss": nll_loss(output, target), "val_accuracy": hits}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.config["lr"])

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
        whole = TensorDataset(images, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(0)
        self.train_set, self.val_set = random_split(whole, [1500, 297], generator)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.config[BATCH_SIZE], shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.config[BATCH_SIZE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=TrainingOperator.from_ptl(LitMNIST),
        num_workers=arguments.num_workers,
        config={"lr": 1e-3, BATCH_SIZE: 64},
    )
    for _ in range(arguments.epochs):
        result, validated = trainer.train(), trainer.validate()
        print(
            f"epoch {result['epoch']}  train_loss {result['train_loss']:.4f}"
            f"  val_loss {validated['val_loss']:.4f}  val_accuracy {validated['val_accuracy']:.3f}"
        )
    print("the model:", type(trainer.get_model()).__name__)
    trainer.shutdown()


if __name__ == "__main__":
    main()
