# SPDX-License-Identifier: Apache-2.0
"""Weighted means of one metric: on one worker over its batches, and over several workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lockstep.errors import WeightError
from lockstep.metrics.metric_values import read_numbers, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def as_weight(n: Any) -> float:
    """`n` as a Python number.

    Raises:
        WeightError: `n` is negative, NaN or infinite.
    """
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
        return counting[0][0]  # the exact value; value * weight / weight may differ
    weight = sum(weight for _, weight in counting)
    return sum(value * weight for value, weight in counting) / weight


@dataclass(slots=True)
class WeightedMean:
    """One metric's weighted sum over all steps, and its weighted mean over the latest step.

    The latest step is held as a mean and not as a sum: the mean of a step of one part is then
    exactly that part's value (0.1 * 3 / 3 is not 0.1).
    """

    total: Any = 0
    weight: float = 0
    last_step: int = 0
    last_mean: Any = 0
    last_weight: float = 0

    def fits(self, summand: Any) -> bool:
        """Whether `summand` can be added: all have one shape."""
        return not self.weight or shape_of(self.total) == shape_of(summand)

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


def merge_means(workers: Sequence[WeightedMean]) -> tuple[Any, Any]:
    """One metric's mean over several workers, and its mean over the latest step of any of them."""
    weight = sum(mean.weight for mean in workers)
    last_step = max(mean.last_step for mean in workers)
    latest = weighted_mean(
        (mean.last_mean, mean.last_weight) for mean in workers if mean.last_step == last_step
    )
    return (sum(mean.total for mean in workers) / weight if weight else math.nan), latest
