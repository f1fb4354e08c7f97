# SPDX-License-Identifier: Apache-2.0
"""RaySGD's CIFAR example: a residual network, a schedule of learning rates, validation.

    python examples/raysgd/cifar.py --num-workers 2

In the place of CIFAR's photographs there are made ones of the same size, 32 x 32 in three colours:
a grating of a direction and colour for each of four classes, under noise. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

CLASSES = 4


def pictures(count: int, seed: int) -> TensorDataset:
    """Images (N, 3, 32, 32) and their classes (N,)."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = classes * (torch.pi / CLASSES)
    across, down = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="xy")
    wave = torch.sin(
        angle.cos().view(-1, 1, 1) * across / 2
        + angle.sin().view(-1, 1, 1) * down / 2
        + 6.3 * torch.rand(count, 1, 1, generator=generator)
    )
    colours = torch.eye(CLASSES, 3).add(0.5)[classes].view(-1, 3, 1, 1)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(wave.unsqueeze(1) * colours + noise, classes)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.layers(x))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def quiet_threads() -> None:
    """Runs first in each worker's process."""
    os.environ["OMP_NUM_THREADS"] = "1"


class Cifar(TrainingOperator):
    def setup(self, config):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.1)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=scheduler,
        )
        train = DataLoader(pictures(512, seed=0), batch_size=config[BATCH_SIZE], shuffle=True)
        validation = DataLoader(pictures(128, seed=1), batch_size=config[BATCH_SIZE])
        self.register_data(train_loader=train, validation_loader=validation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=Cifar,
        initialization_hook=quiet_threads,
        num_workers=arguments.num_workers,
        config={"lr": 0.05, BATCH_SIZE: 64},
        scheduler_step_freq="epoch",
        use_tqdm=True,
    )
    for epoch in range(arguments.epochs):
        result = trainer.train(info={"epoch_idx": epoch, "num_epochs": arguments.epochs})
        validated = trainer.validate()
        print(
            f"epoch {result['epoch']}  train_loss {result['train_loss']:.4f}"
            f"  val_loss {validated['val_loss']:.4f}  val_accuracy {validated['val_accuracy']:.3f}"
        )
    trainer.shutdown()


if __name__ == "__main__":
    main()
