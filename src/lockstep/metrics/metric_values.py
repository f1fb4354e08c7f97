# SPDX-License-Identifier: Apache-2.0
"""What counts as a number among the metrics of a batch, and how numbers become weighted means."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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


def is_scalar(value: Any) -> TypeGuard[Tensor]:
    """Whether `value` is a tensor that holds one real number."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _tensor_as_number(tensor: Tensor) -> Any:
    if not is_scalar(tensor):
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


@dataclass(slots=True)
class WeightedMean:
    """The sums of one metric: over all that was added, and over the parts of its latest step.

    The latest step is held as a mean and not as a sum: a step of one part then gives back
    exactly the value that went in (0.1 * 3 / 3 is not 0.1).
    """

    total: Any = 0
    weight: float = 0
    last_step: int = 0
    last_mean: Any = 0
    last_weight: float = 0

    def add(self, value: Any, weight: float, step: int) -> None:
        part = value * weight
        self.total = self.total + part  # not in place: copies share their tensors
        self.weight += weight
        if step == self.last_step:
            both = self.last_weight + weight
            self.last_mean = (self.last_mean * self.last_weight + part) / both
            self.last_weight = both
        else:
            self.last_step, self.last_mean, self.last_weight = step, value, weight


def read_means(means: Mapping[str, WeightedMean]) -> dict[str, WeightedMean]:
    """Copies that hold Python's numbers, with one wait for each device."""
    totals = read_numbers(mean.total for mean in means.values())
    last_means = read_numbers(mean.last_mean for mean in means.values())
    return {
        name: replace(mean, total=total, last_mean=last_mean)
        for (name, mean), total, last_mean in zip(means.items(), totals, last_means, strict=True)
    }


def merged_mean(workers: Sequence[WeightedMean]) -> tuple[Any, Any]:
    """One metric's mean over several workers, and its mean over the latest step of any of them."""
    weight = sum(mean.weight for mean in workers)
    last_step = max(mean.last_step for mean in workers)
    latest = weighted_mean(
        (mean.last_mean, mean.last_weight) for mean in workers if mean.last_step == last_step
    )
    return (sum(mean.total for mean in workers) / weight if weight else math.nan), latest
