# SPDX-License-Identifier: Apache-2.0
"""What counts as a number, and how numbers are weighted."""

from __future__ import annotations

import math
from collections import defaultdict
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Iterable


def as_number(value: Any) -> Any:
    """`value` as something to average (device tensors stay there), or None if it is none."""
    if type(value) in (float, int):  # the common case, before slower questions
        return value
    if isinstance(value, Tensor):
        return _tensor_as_number(value)
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, Real) else None


def _tensor_as_number(tensor: Tensor) -> Any:
    if tensor.numel() != 1 or tensor.is_complex():
        return None
    if tensor.device.type == "cpu":
        return tensor.item()
    # `.item()` would stop the host until the device has caught up, once per metric and batch.
    widest = torch.float32 if tensor.device.type == "mps" else torch.float64
    return tensor.detach().reshape(()).to(widest)


def read_numbers(values: Iterable[Any]) -> list[Any]:
    """The numbers as Python's, with one wait per device and not one per number."""
    numbers = list(values)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            by_device[number.device].append(index)
    for indices in by_device.values():
        read = torch.stack([numbers[index] for index in indices]).tolist()
        for index, number in zip(indices, read, strict=True):
            numbers[index] = number
    return numbers


def checked_weight(n: Any) -> float:
    number: float = n.item() if isinstance(n, Tensor | np.generic | np.ndarray) else n
    if not 0 <= number < math.inf:
        raise WeightError(
            "metrics cannot be weighted with this number of samples, or tokens",
            expected="a number from 0 upwards",
            got=repr(n),
        )
    return number


def weighted_mean(pairs: Iterable[tuple[Any, float]]) -> Any:
    """The mean of (value, weight) pairs; unweighted if all weights are zero."""
    every = list(pairs)
    counting = [pair for pair in every if pair[1] > 0] or [(value, 1) for value, _ in every]
    if len(counting) == 1:
        return counting[0][0]  # exactly, not value * weight / weight
    weight = sum(weight for _, weight in counting)
    return sum(value * weight for value, weight in counting) / weight
