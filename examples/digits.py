# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits with two workers, save it, and use it.

    python examples/digits.py

The data is scikit-learn's: 1,797 real handwritten digits of 8 x 8 pixels, no download.
"""

from __future__ import annotations

import argparse
from math import ceil
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,500 digits to train on and 297 to validate on: images (N, 1, 8, 8), classes (N,)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).div(16).unsqueeze(1)
    classes = torch.tensor(data.target)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1500], order[1500:]
    return (
        TensorDataset(images[train], classes[train]),
        TensorDataset(images[validation], classes[validation]),
    )


class Digits(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        train, validation = digits()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4
        )
        steps = config["epochs"] * ceil(len(train) / config[BATCH_SIZE].whole)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], steps)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=scheduler,
        )
        self.register_data(
            train_loader=DataLoader(train, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, batch_size=config[BATCH_SIZE]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/digits.pt"))
    arguments = parser.parse_args()

    config = {"lr": 0.1, "epochs": arguments.epochs, BATCH_SIZE: 64}
    with TorchTrainer(
        training_operator_cls=Digits,
        num_workers=arguments.num_workers,
        config=config,
        scheduler_step_freq="batch",
        use_tqdm=True,
    ) as trainer:
        print("epoch  samples  train loss  validation loss  validation accuracy")
        for _ in range(arguments.epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"{train['epoch']:5}  {train['num_samples']:7}  {train['train_loss']:10.4f}"
                f"  {validation['val_loss']:15.4f}  {validation['val_accuracy']:19.2%}"
            )
        path = trainer.save(arguments.checkpoint)

    print(f"\nsaved {path}; a new trainer, with one worker, goes on from it:")
    with TorchTrainer(
        training_operator_cls=Digits, config=config, scheduler_step_freq="batch"
    ) as trainer:
        trainer.load(path)
        reloaded = trainer.validate()
        model = trainer.get_model()
    print(f"validation accuracy {reloaded['val_accuracy']:.2%}")

    images, classes = digits()[1][:10]
    with torch.no_grad():
        predicted = model(images).argmax(dim=1)
    print("\nten digits of the validation set")
    print("true       ", *classes.tolist())
    print("predicted  ", *predicted.tolist())
    if reloaded["val_accuracy"] < 0.97:
        raise SystemExit("the validation accuracy is below 97 %")


if __name__ == "__main__":
    main()
