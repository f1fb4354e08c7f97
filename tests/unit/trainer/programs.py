# SPDX-License-Identifier: Apache-2.0
"""Small operators for one worker in this process, and plain autograd to hold them to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import TorchTrainer, TrainingOperator

SAMPLES, BATCH = 22, 6
STEPS_PER_EPOCH = 4


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
    return features, targets


def linear(seed: int = 0) -> nn.Linear:
    layer = nn.Linear(3, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class NestedState(torch.optim.SGD):
    """Keeps its state in a form of its own."""

    def state_dict(self):
        return {"inner": super().state_dict(), "version": 1}

    def load_state_dict(self, state):
        super().load_state_dict(state["inner"])


def loader(shuffle: bool = False, **fields: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*problem()), BATCH, shuffle=shuffle, **fields)


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self):
        return iter(list(zip(*problem(), strict=True)))


class Regression(TrainingOperator):
    """The least that trains: everything by default."""

    def setup(self, config):
        model = linear()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=self.data(), validation_loader=loader())

    def data(self):
        return loader(shuffle=self.config.get("shuffle", False))


class Streaming(Regression):
    def data(self):
        return DataLoader(Stream(), BATCH)


def trainer(operator: type[TrainingOperator] = Regression, **arguments: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=operator, **arguments)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(steps: int, loss: Any = nn.functional.mse_loss, lr: float = 0.1) -> torch.Tensor:
    """The weights after `steps` unshuffled steps of plain autograd."""
    features, targets = problem()
    model = linear()
    optimizer = sgd(model, lr)
    starts = range(0, SAMPLES, BATCH)
    for step in range(steps):
        rows = slice(starts[step % len(starts)], starts[step % len(starts)] + BATCH)
        optimizer.zero_grad()
        loss(model(features[rows]), targets[rows]).backward()
        optimizer.step()
    return weights(model)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the order of additions."""
    return torch.allclose(got, expected, rtol=1e-12, atol=1e-13)
