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
from torch.utils.data import ConcatDataset, Subset

from lockstep.data.shard_assignment import shard_bounds
from lockstep.held_columns import columns_of, datasets_in, without_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.held_columns import Column

_log = logging.getLogger("lockstep")

NUMBERS: Final = "numbers"
"""The key of `numbers_of` beside the fields of `plan_fingerprint`."""

_PLACES: Final = 8
"""Samples of each column, evenly spread."""
_COLUMNS: Final = 4
_ELEMENTS: Final = 4096
"""Of a sample, at most."""
_PARTS: Final = 8
_DEPTH: Final = 3
_ROUNDING: Final = 1e-4
"""Of the largest number: far more than what hosts and libraries compute differently."""
_COARSE: Final = 0.05
"""The same for numbers of two bytes or fewer."""


def numbers_of(dataset: Any) -> list[list[float]]:
    """For each of some columns of `dataset` what counts as rounding, and a number for some samples.

    Nothing of the program's is called, see `lockstep.held_columns`.
    """
    found: list[list[float]] = []
    for column, size in _columns_within(dataset, _DEPTH):
        places = [shard_bounds(size, _PLACES, part)[0] for part in range(_PLACES)]
        with suppress(Exception):  # of a library's column that cannot be read so
            values = column.read(places)
            plain = [without_objects(value, with_floats=True) for value in values]
            numbers = [_number_of(value) for value in plain]
            if all(number is not None and math.isfinite(number) for number in numbers):
                rounding = _COARSE if any(map(_is_coarse, values)) else _ROUNDING
                found.append([rounding, *(float(f"{number:.7g}") for number in numbers)])
        if len(found) == _COLUMNS:
            break
    return found


def _columns_within(dataset: Any, depth: int) -> Iterator[tuple[Column, int]]:
    if type(dataset) in (ConcatDataset, Subset):
        inner = dataset.datasets if type(dataset) is ConcatDataset else [dataset.dataset]
        for each in inner:
            yield from _columns_within(each, depth)
        return
    with suppress(TypeError, NotImplementedError):  # from its `__len__`
        size = len(dataset)
        for column in columns_of(dataset, size):
            yield column, size
        if depth:
            for each in datasets_in(dataset, size):
                yield from _columns_within(each, depth - 1)


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
    parts = sample.values() if isinstance(sample, dict) else sample
    if not isinstance(sample, dict | list | tuple):
        return None
    numbers = [_number_of(part) for part in list(parts)[:_PARTS]]
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _is_coarse(sample: Any) -> bool:
    dtype = getattr(sample, "dtype", None)
    return getattr(dtype, "itemsize", 8) <= 2 and "float" in str(dtype)


def warn_of_other_numbers(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Warn where the ranks' datasets hold other numbers at the same positions.

    Args:
        by_rank: the `numbers_of` each rank, under `NUMBERS`; a rank without them is not compared.
    """
    numbers = [each.get(NUMBERS) or [] for each in by_rank]
    odd = [rank for rank, found in enumerate(numbers) if _differ(numbers[0], found)]
    if odd:
        _log.warning(
            "the dataset of rank(s) %s has other numbers at the same positions than that of rank 0."
            " If each rank has taken a part of the data, most samples are never read: build the"
            " whole dataset on every rank, lockstep gives each its part. If the data is drawn at"
            " random, seed it alike on every rank (torch.manual_seed(0) before it is drawn)",
            ", ".join(map(str, odd)),
        )


def _differ(first: list[list[float]], other: list[list[float]]) -> bool:
    if len(first) != len(other):
        return False
    return any(_are_other(one, two) for one, two in zip(first, other, strict=True))


def _are_other(one: list[float], two: list[float]) -> bool:
    scale = max(map(abs, (*one[1:], *two[1:])))
    least = max(one[0], two[0]) * scale
    pairs = zip(one[1:], two[1:], strict=True)
    return 2 * sum(abs(here - there) > least for here, there in pairs) >= _PLACES
