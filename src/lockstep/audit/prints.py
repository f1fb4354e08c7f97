# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of tensors as numbers. No torch: whoever reads ledgers need not import it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

ABSENT: Final = np.iinfo(np.int64).min
"""The hash of a tensor that is None."""

SAMPLES: Final = 256
"""How many elements are kept of all tensors together."""


@dataclass(frozen=True)
class Fingerprint:
    """Of P tensors, in their order: `hashes` (P,), `norms` (P,), and `samples` (S,) of them all."""

    hashes: np.ndarray[Any, Any]
    norms: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]

    def is_absent(self, index: int) -> bool:
        """Was that tensor None?"""
        return bool(self.hashes[index] == ABSENT)


@dataclass(frozen=True)
class Sketch:
    """Of P gradients: `norms` (P,), and `samples` (S,) of them all; NaN for those that are None."""

    norms: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]


def differing(
    prints: Sequence[Fingerprint],
    counts: Sequence[int] = (),
    norms: float = 1e-6,
    samples: float = 1e-5,
) -> list[int]:
    """The places of tensors that are not the same on all ranks, by more than rounding.

    By their sampled elements too: two masks that keep as much of a layer have the same norm, and so
    have two weights that are orthogonal.

    Args:
        counts: so many elements were sampled of each tensor; none: they are not compared.
        norms: of the largest, by so much those of a tensor may differ.
        samples: the same of its sampled elements.
    """
    hashes = np.array([each.hashes for each in prints])
    of_norms = np.array([each.norms for each in prints])
    elements = np.array([each.samples for each in prints]) if counts else None
    ends = list(accumulate(counts))
    return [
        place
        for place in map(int, np.flatnonzero((hashes != hashes[0]).any(axis=0)))
        if are_apart(of_norms[:, place], norms)
        or (
            elements is not None
            and are_apart(elements[:, ends[place] - counts[place] : ends[place]], samples)
        )
    ]


def are_apart(of_ranks: np.ndarray[Any, Any], allowed: float = 1e-6) -> bool:
    """By more than `allowed` of the largest, or because one is no number."""
    with np.errstate(invalid="ignore"):
        spread = of_ranks.max(axis=0) - of_ranks.min(axis=0)
    return not np.max(spread, initial=0.0) <= allowed * np.abs(of_ranks).max(initial=0.0)


def samples_per_tensor(sizes: Sequence[int]) -> list[int]:
    """How many elements are sampled of each: all of small models, a few of large ones."""
    if sum(sizes) <= SAMPLES:
        return list(sizes)
    share = SAMPLES // len(sizes)
    if share:
        return [min(size, share) for size in sizes]
    # More tensors than samples: every k-th gives one.
    stride = -(-len(sizes) // SAMPLES)
    return [min(size, 1) if place % stride == 0 else 0 for place, size in enumerate(sizes)]
