# SPDX-License-Identifier: Apache-2.0
"""Finds what can be averaged among the metrics of a batch, and reads it with one wait for each
device: numbers, and tensors and arrays of numbers, element by element.

A mean of an array is held by each worker, sent, and copied now and then while a call runs, as the
mean of a number is. So it is taken of up to `MAX_ELEMENTS`: a confusion matrix of 256 classes.
"""

from __future__ import annotations

from collections import defaultdict
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable


MAX_ELEMENTS: Final = 256**2
"""Of a tensor or an array that is averaged."""


def as_summand(value: Any) -> Any:
    """`value` as something to average, or None if it is nothing of the kind.

    A number (see `as_number`); or a float64 copy of a tensor, on its device, or of an array.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        is_several = 1 < value.size <= MAX_ELEMENTS
    else:
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        is_several = is_plain and not value.is_complex() and 1 < value.numel() <= MAX_ELEMENTS
    return addable(value) if is_several else as_number(value)


def shape_of(summand: Any) -> tuple[int, ...]:
    """The shape of a value from `as_summand`; a number's is empty."""
    return tuple(getattr(summand, "shape", ()))


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two metrics that cannot be averaged are the same, as far as it shows without a wait:
    tensors on a device are if they are one object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, Tensor):
            is_known = one.device.type == other.device.type == "cpu" and one.dtype == other.dtype
            return is_known and torch.equal(one, other)
        return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)
    # Containers with tensors within raise, sparse tensors do, and an `__eq__` of a user's own may
    # raise anything: a question that only a warning needs does not end the training.
    except Exception:
        return False


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor or an array, of any shape and dtype."""
    return isinstance(value, Tensor | np.ndarray)


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
    if isinstance(value, np.ndarray) and value.size > 1:
        return value.astype(np.float64)
    if isinstance(value, Tensor):
        widest = torch.float32 if value.device.type == "mps" else torch.float64
        return value.detach().to(value.dtype if value.is_complex() else widest, copy=True)
    number = as_number(value)
    return value if number is None else number


def read_numbers(values: Iterable[Any]) -> list[Any]:
    """`values` as Python's numbers, with one wait for each device and not for each number; tensors
    of several elements as tensors on the CPU."""
    numbers = list(values)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor) and number.ndim:
            numbers[index] = number.cpu()
        elif isinstance(number, Tensor):
            by_device[number.device].append(index)
    for indices in by_device.values():
        read = torch.stack([numbers[index] for index in indices]).tolist()
        for index, number in zip(indices, read, strict=True):
            numbers[index] = number
    return numbers
