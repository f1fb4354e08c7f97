# SPDX-License-Identifier: Apache-2.0
"""Two towers that find each other: which right half of a digit belongs to which left half?

    python examples/contrastive.py

The loss compares every left half with every right half of the *global* batch, so it talks to the
other workers (`joint_loss = True`), and its gradient is that of one process with the same batch.
The data is scikit-learn's: 1,797 real handwritten digits of 8 x 8 pixels, no download. The last
batch of an epoch is smaller, and not equally large on all workers.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

HELD_OUT = 297


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """The left and the right halves of the digits, in one random order; each (1797, 32)."""
    images = torch.tensor(load_digits().images, dtype=torch.float32).div(16)
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    return images[:, :, :4].flatten(1), images[:, :, 4:].flatten(1)


class Towers(nn.Module):
    """An encoder for each side, and the temperature of the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, width)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1)


class FindTheOtherHalf(TrainingOperator):
    joint_loss = True

    def setup(self, config):
        model = Towers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.05)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        data = TensorDataset(*(half[:-HELD_OUT] for half in halves()))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True))

    def compute_loss(self, batch, batch_info):
        left, right = self.model(*batch)
        return lockstep.info_nce(left, right, self.model.log_scale.exp())


def retrieval_accuracy(model: nn.Module) -> float:
    """How often a held-out left half is nearest to its own right half, among 297."""
    with torch.no_grad():
        left, right = model(*(half[-HELD_OUT:] for half in halves()))
    return ((left @ right.T).argmax(dim=1) == torch.arange(HELD_OUT)).float().mean().item()


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40)
    arguments = parser.parse_args(given)

    with TorchTrainer(
        training_operator_cls=FindTheOtherHalf,
        num_workers=arguments.num_workers,
        # 1,500 samples in batches of 256: five, and one of 220.
        config={"lr": 3e-3, BATCH_SIZE: 256},
    ) as trainer:
        for epoch in range(1, arguments.epochs + 1):
            result = trainer.train()
            if epoch % 10 == 0 or epoch == arguments.epochs:
                print(f"epoch {epoch:3}  loss {result['train_loss']:.3f}")
        model = trainer.get_model()
    accuracy = retrieval_accuracy(model)
    print(f"the right half is found among {HELD_OUT}: {accuracy:.1%} (by chance 0.3%)")
    if arguments.epochs >= 40 and accuracy < 0.25:
        raise SystemExit("the retrieval accuracy is below 25 %")


if __name__ == "__main__":
    main()
