# SPDX-License-Identifier: Apache-2.0
"""What all programs here train: a small classifier of real digits, in float64."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

GLOBAL_BATCH, EPOCHS, WORKERS = 32, 2, 2


def data() -> TensorDataset:
    """320 digits: images (N, 64) and classes (N,). Ten global batches of 32."""
    digits = load_digits()
    images = torch.tensor(digits.images[:320] / 16).flatten(1)
    return TensorDataset(images, torch.tensor(digits.target[:320]))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def say_distance(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    distance = max((a - b).abs().max().item() for a, b in pairs)
    print("weights of the two:", "equal" if distance < 1e-12 else f"off by {distance:.4f}")
