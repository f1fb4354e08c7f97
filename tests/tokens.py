# SPDX-License-Identifier: Apache-2.0
"""Sequences of unequal length, an operator that weighs them by tokens, and the same by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE, WEIGHT

BATCH = 5
PAD, CLASSES = -100, 4
LENGTHS = [6, 0, 1, 3, 2, 5, 0, 0, 6, 1, 4, 2, 0, 3, 1, 6, 2, 5, 1]
"""The first batch of 4 shards has one without tokens, the second one two."""


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Features (19, 6, 3) and classes (19, 6), padded with `PAD`."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(len(LENGTHS), 6, 3, generator=generator, dtype=torch.float64)
    classes = torch.randint(CLASSES, (len(LENGTHS), 6), generator=generator)
    padding = torch.arange(6) >= torch.tensor(LENGTHS).unsqueeze(1)
    return features, classes.masked_fill(padding, PAD)


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Tokens(TrainingOperator):
    def setup(self, config):
        model = net()
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)

    def compute_loss(self, batch, batch_info):
        features, classes = batch
        output = self.model(features).flatten(0, 1)
        tokens = (classes != PAD).sum()
        hits = (output.argmax(dim=-1) == classes.flatten()).sum()
        # Without tokens both are 0 / 0.
        loss = nn.functional.cross_entropy(output, classes.flatten(), ignore_index=PAD)
        return loss, {WEIGHT: tokens, "hits": hits / tokens}


class OwnStep(Tokens):
    """The same objective in a `train_batch` and a `validate_batch` of one's own."""

    def train_batch(self, batch, batch_info):
        loss, metrics = self.compute_loss(batch, batch_info)
        self.optimizer.zero_grad()
        self.backward(loss, weight=metrics[WEIGHT])
        self.optimizer.step()
        return {"train_loss": loss.item(), **metrics}


class OwnEpoch(OwnStep):
    def train_epoch(self, iterator, info):
        sums, tokens = 0.0, 0
        for batch in iterator:
            metrics = self.train_batch(batch, info)
            sums += metrics["train_loss"] * int(metrics[WEIGHT])
            tokens += int(metrics[WEIGHT])
        return {"train_loss": sums / tokens, WEIGHT: tokens}


@dataclass(frozen=True)
class ByHand:
    """Two epochs in one process: the model, and the loss of the second per token."""

    model: nn.Module
    loss: float
    last_loss: float


def by_hand(accumulate: int = 1) -> ByHand:
    features, classes = problem()
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        sums = []
        for start in range(0, len(LENGTHS), BATCH * accumulate):
            optimizer.zero_grad()
            rows = slice(start, start + BATCH * accumulate)
            losses = per_token(model, features[rows], classes[rows])
            losses.sum().div((classes[rows] != PAD).sum()).backward()
            sums += [each.sum().item() for each in losses.split(BATCH)]
            optimizer.step()
    in_last = (classes[len(LENGTHS) // BATCH * BATCH :] != PAD).sum().item()
    return ByHand(model, sum(sums) / sum(LENGTHS), sums[-1] / in_last)


def per_token(model: nn.Module, features: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Shape (N, 6): cross-entropies, zero where there is no token."""
    output = model(features).transpose(1, 2)
    return nn.functional.cross_entropy(output, classes, ignore_index=PAD, reduction="none")


def farthest(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
