# SPDX-License-Identifier: Apache-2.0
"""The operators of these tests, and the one-process runs that they have to equal."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE

SAMPLES, GLOBAL_BATCH, STEPS = 37, 12, 15


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
    return features, targets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=torch.float64)
        self.second = nn.Linear(7, 2, dtype=torch.float64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

    def another_way(self, x):
        return self.second(torch.sigmoid(self.first(x)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class DefaultLoop(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := net()), optimizers=sgd(model), criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


class PlainBackward(TrainingOperator):
    """Two models with a step each, as one writes it without any library."""

    def setup(self, config):
        one, two = net(), net()
        self.models, self.optimizers, self.criterion = self.register(
            models=[one, two], optimizers=[sgd(one), sgd(two)], criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        features, targets = batch
        losses = []
        for model, forward, optimizer in (
            (self.models[0], self.models[0], self.optimizers[0]),
            (self.models[1], self.models[1].another_way, self.optimizers[1]),
        ):
            assert model is not None
            optimizer.zero_grad()
            loss = self.criterion(forward(features), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"train_loss": losses[0], "other_loss": losses[1]}


def one_process(forward: str = "forward", clip: float = float("inf")) -> Net:
    """The same steps by plain autograd, without any of lockstep."""
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    starts = list(range(0, SAMPLES, GLOBAL_BATCH))
    for step in range(STEPS):
        start = starts[step % len(starts)]
        rows = slice(start, start + GLOBAL_BATCH)
        optimizer.zero_grad()
        nn.functional.mse_loss(getattr(model, forward)(features[rows]), targets[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def farthest(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
