# SPDX-License-Identifier: Apache-2.0
"""The five models that steps are timed on, from overhead alone to arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        title: as the tables show it.
        make_samples: ``make_samples(n)``: features and targets of n samples.
        batch_size: of one worker.
        steps: in one timed block; long enough that a clock reading is nothing beside it.
    """

    title: str
    make_model: Callable[[], nn.Module]
    make_samples: Callable[[int], Batch]
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch_size: int
    steps: int


class TokenModel(nn.Module):
    """A transformer encoder that says something about every token; about 0.7 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(256, 128)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) token numbers to (batch, classes, length) scores."""
        return self.head(self.encoder(self.embedding(tokens))).transpose(1, 2)


def _stack(width: int, layers: int, activation: type[nn.Module]) -> nn.Module:
    pairs = [(nn.Linear(width, width), activation()) for _ in range(layers)]
    return nn.Sequential(*[module for pair in pairs for module in pair])


def _large_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 1024),
    )


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _vectors(width: int) -> Callable[[int], Batch]:
    def make(count: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(count, width, generator=generator)
        return features, torch.randn(count, width, generator=generator)

    return make


def _images(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, 3, 32, 32, generator=generator)
    return features, torch.randint(10, (count,), generator=generator)


def _tokens(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (count, 33), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


_squares, _classes = nn.functional.mse_loss, nn.functional.cross_entropy

WORKLOADS = {
    "tiny": Workload(
        "MLP 64x4", lambda: _stack(64, 4, nn.ReLU), _vectors(64), _squares, batch_size=32, steps=40
    ),
    "many": Workload(
        "200 small layers",
        lambda: _stack(16, 200, nn.Tanh),
        _vectors(16),
        _squares,
        batch_size=8,
        steps=6,
    ),
    "large": Workload("8 M MLP", _large_mlp, _vectors(1024), _squares, batch_size=32, steps=2),
    "convnet": Workload("convnet", _convnet, _images, _classes, batch_size=16, steps=4),
    "transformer": Workload(
        "small transformer", TokenModel, _tokens, _classes, batch_size=8, steps=3
    ),
}


def make_model(name: str) -> nn.Module:
    """The same weights for everybody; the caller's random numbers go on from a fixed place."""
    torch.manual_seed(0)
    return WORKLOADS[name].make_model()
