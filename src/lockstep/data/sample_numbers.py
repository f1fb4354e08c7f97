# SPDX-License-Identifier: Apache-2.0
"""Compares the numbers in the ranks' datasets, where they may differ in right programs.

Another rank's floating point may have other last bits, and unseeded synthetic data is drawn anew by
each rank: neither loses samples. A dataset that was split by rank before does, and its numbers show
it. So a difference far beyond rounding is told of, and nothing is refused.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lockstep.data.shard_assignment import shard_bounds
from lockstep.held_columns import columns_within, plain_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.held_columns import Column

_log = logging.getLogger("lockstep")
_told_of: set[tuple[str, str]] = set()
"""The columns of which this process has warned, with the ranks that differ."""

NUMBERS: Final = "numbers"
"""The key of `numbers_of` beside the fields of `plan_fingerprint`."""

_PLACES: Final = 8
"""Samples of each column, evenly spread."""
_COLUMNS: Final = 4
_ELEMENTS: Final = 4096
"""Of a sample, at most."""
_ROUNDING: Final = 1e-4
"""Of the largest number: far more than what hosts and libraries compute differently."""
_COARSE: Final = 0.05
"""The same for numbers of two bytes or fewer."""


def numbers_of(dataset: Any) -> list[tuple[str, list[float]]]:
    """The names of some columns of `dataset`, with what counts as rounding, and some numbers.

    Those have one for each of some samples. Nothing of the program's is called, see
    `lockstep.held_columns`.
    """
    found: list[tuple[str, list[float]]] = []
    with suppress(Exception):  # of the program's `__len__`: nothing can be told
        for column in columns_within(dataset):
            numbers = [] if column.is_choice else _numbers_in(column)
            if numbers:
                found.append((column.name, numbers))
            if len(found) == _COLUMNS:
                break
    return found


def _numbers_in(column: Column) -> list[float]:
    places = [shard_bounds(column.size, _PLACES, part)[0] for part in range(_PLACES)]
    with suppress(Exception):  # of a library's column that cannot be read so
        values = column.read(places)
        numbers = [_number_of(plain_of(value, with_objects=True)) for value in values]
        if all(number is not None and math.isfinite(number) for number in numbers):
            rounding = _COARSE if any(map(_is_coarse, values)) else _ROUNDING
            return [rounding, *(float(f"{number:.7g}") for number in numbers)]
    return []


def _number_of(sample: Any) -> float | None:
    """A number that changes with the numbers in a sample; None where there are none."""
    if isinstance(sample, torch.Tensor):
        if sample.is_complex() or sample.is_quantized or not sample.numel():
            return None
        return float(sample.detach().reshape(-1)[:_ELEMENTS].double().mean())
    if isinstance(sample, np.ndarray | np.generic):
        is_number = sample.dtype.kind in "iufb" and sample.size
        return (
            float(sample.reshape(-1)[:_ELEMENTS].astype(np.float64).mean()) if is_number else None
        )
    if isinstance(sample, int | float):
        return float(sample)
    if not isinstance(sample, list):
        return None
    known = [number for part in sample if (number := _number_of(part)) is not None]
    return sum(known) if known else None


def _is_coarse(sample: Any) -> bool:
    dtype = getattr(sample, "dtype", None)
    return getattr(dtype, "itemsize", 8) <= 2 and "float" in str(dtype)


def warn_of_other_numbers(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Warn where the ranks' datasets hold other numbers at the same positions.

    Once in a process, of a column that several loaders read: a program may build one in each epoch.

    Args:
        by_rank: the `numbers_of` each rank, under `NUMBERS`; a rank without them is not compared.
    """
    numbers = [each.get(NUMBERS) or [] for each in by_rank]
    differing = [_differing(numbers[0], found) for found in numbers]
    odd = ", ".join(str(rank) for rank, column in enumerate(differing) if column is not None)
    column = next((each for each in differing if each is not None), None)
    if column is None or (column, odd) in _told_of:
        return
    _told_of.add((column, odd))
    _log.warning(
        "the dataset of rank(s) %s has other numbers%s at the same positions than that of rank 0."
        " If each rank has taken a part of the data, most samples are never read: build the"
        " whole dataset on every rank, lockstep gives each its part. If the data is drawn at"
        " random, seed it alike on every rank (torch.manual_seed(0) before it is drawn)",
        odd,
        column and f" in its `{column}`",
    )


def _differing(first: Sequence[Any], other: Sequence[Any]) -> str | None:
    """The name of the first column with other numbers; empty where the dataset is the column."""
    if len(first) != len(other):
        return None
    pairs = zip(first, other, strict=True)
    return next((name for (name, one), (_, two) in pairs if _are_other(one, two)), None)


def _are_other(one: list[float], two: list[float]) -> bool:
    scale = max(map(abs, (*one[1:], *two[1:])))
    least = max(one[0], two[0]) * scale
    pairs = zip(one[1:], two[1:], strict=True)
    return 2 * sum(abs(here - there) > least for here, there in pairs) >= _PLACES
