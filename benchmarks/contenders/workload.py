# SPDX-License-Identifier: Apache-2.0
"""The model and the data that every contender trains: a small network on synthetic numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

FEATURES = 64
CLASSES = 10
BATCH_SIZE = 32
"""Of one worker."""
LEARNING_RATE = 0.1
NUM_WORKERS = 2


def make_model() -> nn.Module:
    """Four layers of 64, about 13 000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def make_dataset(num_steps: int) -> TensorDataset:
    """Enough samples for `num_steps` steps of all workers."""
    generator = torch.Generator().manual_seed(0)
    num_samples = num_steps * NUM_WORKERS * BATCH_SIZE
    return TensorDataset(
        torch.randn(num_samples, FEATURES, generator=generator),
        torch.randint(CLASSES, (num_samples,), generator=generator),
    )
