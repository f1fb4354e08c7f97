# SPDX-License-Identifier: Apache-2.0
"""Orders the workers' predictions: one item per sample, in the dataset's order."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from lockstep.trainer.split_predictions import split_predictions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.worker import Prediction


def order_predictions(answers: Iterable[Sequence[Prediction]]) -> list[Any]:
    """Order predictions as the dataset, if known, otherwise as the loader.

    The dataset's order is known where the loader's sampler takes each index once. A sampler that
    leaves samples out or repeats some has an order of its own.
    """
    parts = sorted((part for own in answers for part in own), key=lambda p: (p.step, p.shard))
    keyed: list[tuple[Any, Any]] = []
    indices: list[Any] = []
    for part in parts:
        items = split_predictions(part.output, part.num_samples)
        numbers = [_as_int(index) for index in part.indices]
        indices += numbers
        # A dataset of ready batches has one index for all the samples of a batch.
        per_sample = len(numbers) == len(items)
        first = numbers[0] if numbers else None
        keyed += zip(numbers if per_sample else [first] * len(items), items, strict=True)
    if _is_permutation(indices):
        keyed.sort(key=lambda pair: pair[0])
    return [item for _, item in keyed]


def _as_int(index: Any) -> Any:
    """An integer of numpy's or torch's, as a sampler may yield it, as an int; the rest as it is."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _is_permutation(indices: Sequence[Any]) -> bool:
    is_numbered = all(isinstance(index, int) for index in indices)
    return bool(indices) and is_numbered and sorted(indices) == list(range(len(indices)))
