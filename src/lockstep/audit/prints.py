# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of tensors as numbers. No torch: whoever reads ledgers need not import it."""

from __future__ import annotations

from dataclasses import dataclass
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
