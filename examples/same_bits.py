# SPDX-License-Identifier: Apache-2.0
"""The same weights, to the last bit, at any number of workers.

    python examples/same_bits.py

Every global batch is cut into four shards, which one, two, three or four workers carry. Data,
random numbers (shuffling, dropout) and running statistics are functions of the shard in any
case, so the weights agree up to rounding; with `reproducible=True` the gradients are also added
in one fixed order, and the weights are the same bits.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ray
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE


class Digits(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(
            nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10)
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
        )
        images, classes = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(classes))
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True))


def trained(num_workers: int, epochs: int, reproducible: bool) -> torch.Tensor:
    """All parameters and running statistics in one row, and nothing rounded."""
    with TorchTrainer(
        training_operator_cls=Digits,
        num_workers=num_workers,
        num_shards=4,
        config={BATCH_SIZE: 100},
        reproducible=reproducible,
    ) as trainer:
        for _ in range(epochs):
            trainer.train()
        state = trainer.get_model().state_dict()
    return torch.cat([values.double().flatten() for values in state.values()])


def digest(weights: torch.Tensor) -> str:
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    arguments = parser.parse_args()
    # One CPU for each worker, as far as Ray knows; on fewer they take turns.
    ray.init(num_cpus=max(arguments.workers), include_dashboard=False, logging_level="ERROR")

    print("         reproducible=True                    reproducible=False")
    print("workers  digest            farthest from the  digest            farthest from the")
    print("         of the weights    first by           of the weights    first by")
    first: dict[bool, torch.Tensor] = {}
    digests: dict[bool, set[str]] = {True: set(), False: set()}
    for num_workers in arguments.workers:
        cells = []
        for reproducible in (True, False):
            weights = trained(num_workers, arguments.epochs, reproducible)
            distance = (weights - first.setdefault(reproducible, weights)).abs().max().item()
            digests[reproducible].add(digest(weights))
            cells.append(f"{digest(weights)}  {distance:17.1e}")
        print(f"{num_workers:7}  {'  '.join(cells)}", flush=True)

    same, different = len(digests[True]), len(digests[False])
    print(f"\nwith reproducible=True {same} digest, without it {different}")
    if same != 1:
        raise SystemExit("the weights depend on the number of workers")


if __name__ == "__main__":
    main()
