# SPDX-License-Identifier: Apache-2.0
"""Orders the workers' predictions: one item per sample, in the dataset's order."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lockstep.data.global_batches import length_or_none
from lockstep.trainer.split_predictions import split_predictions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.worker import Prediction


def order_predictions(answers: Iterable[Sequence[Prediction]], loader: Any) -> list[Any]:
    """Order predictions as the dataset, if known, otherwise as the loader.

    The dataset's order is known where the loader's sampler takes each index of the dataset once. A
    sampler that leaves samples out or repeats some has an order of its own.
    """
    parts = sorted((part for own in answers for part in own), key=lambda p: (p.step, p.shard))
    keyed: list[tuple[Any, Any]] = []
    indices: list[Any] = []
    for part in parts:
        items = split_predictions(part.output, part.num_samples)
        numbers = _numbers(part.indices, len(items))
        indices += numbers
        # A dataset of ready batches has one index for all the samples of a batch.
        per_sample = len(numbers) == len(items)
        first = numbers[0] if numbers else None
        keyed += zip(numbers if per_sample else [first] * len(items), items, strict=True)
    if _is_permutation(indices) and _population(loader) in (None, len(indices)):
        keyed.sort(key=lambda pair: pair[0])
    return [item for _, item in keyed]


def _numbers(indices: Sequence[Any], num_samples: int) -> list[Any]:
    """The `indices` as numbers; those of a dataset that is asked for lists of samples, one by one.

    A sampler of lists with ``batch_size=None`` is torch's way to read many samples at once.
    """
    apart = [number for index in indices for number in (index if _is_list(index) else [index])]
    return [_as_int(index) for index in (apart if len(apart) == num_samples else indices)]


def _population(loader: Any) -> int | None:
    """The length of the loader's dataset, if it has one."""
    return length_or_none(loader.dataset) if isinstance(loader, DataLoader) else None


def _is_list(index: Any) -> bool:
    return isinstance(index, list | tuple) or getattr(index, "ndim", 0) == 1


def _as_int(index: Any) -> Any:
    """An integer of numpy's or torch's, as a sampler may yield it, as an int; the rest as it is."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _is_permutation(indices: Sequence[Any]) -> bool:
    is_numbered = all(isinstance(index, int) for index in indices)
    return bool(indices) and is_numbered and sorted(indices) == list(range(len(indices)))
