# SPDX-License-Identifier: Apache-2.0
"""Finds the numbers among the metrics of a batch, and reads them with one wait for each device."""

from __future__ import annotations

from collections import defaultdict
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def as_number(value: Any) -> Any:
    """`value` as a number to average, or None if it is no number; a tensor stays on its device."""
    if type(value) in (float, int):  # the common case, before slower questions
        return value
    if isinstance(value, Tensor):
        return _tensor_as_number(value)
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, Real) else None


def is_scalar(value: Any) -> TypeGuard[Tensor]:
    """Whether `value` is a tensor that holds one real number."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _tensor_as_number(tensor: Tensor) -> Any:
    if not is_scalar(tensor):
        return None
    if tensor.device.type == "cpu":
        return tensor.item()
    # `.item()` would stop the host until the device has caught up, once per metric and batch.
    number: Tensor = addable(tensor)
    return number.reshape(())


def addable(value: Any) -> Any:
    """`value` in a dtype in which many of its kind can be added up.

    Of a tensor, a copy on its device without its graph: the caller may write to the tensor before
    the sum is read.
    """
    if isinstance(value, Tensor):
        widest = torch.float32 if value.device.type == "mps" else torch.float64
        return value.detach().to(value.dtype if value.is_complex() else widest, copy=True)
    number = as_number(value)
    return value if number is None else number


def read_numbers(values: Iterable[Any]) -> list[Any]:
    """`values` as Python's numbers, with one wait for each device and not for each number."""
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
