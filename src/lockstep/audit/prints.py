# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of tensors as numbers. No torch: whoever reads ledgers need not import it."""

from __future__ import annotations

import base64
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

    def as_json(self) -> dict[str, str]:
        """Bytes as base64: JSON's numbers would lose infinities and take four times the room."""
        return {
            "hashes": base64.b64encode(self.hashes.tobytes()).decode(),
            "norms": base64.b64encode(self.norms.tobytes()).decode(),
            "samples": base64.b64encode(self.samples.tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, packed: dict[str, str]) -> Fingerprint:
        """The inverse of `as_json`."""
        kinds = {"hashes": np.int64, "norms": np.float64, "samples": np.float64}
        return cls(
            **{
                name: np.frombuffer(base64.b64decode(packed[name]), dtype=kind)
                for name, kind in kinds.items()
            }
        )


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
