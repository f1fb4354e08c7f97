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
        return {name: as_base64(getattr(self, name)) for name in _KINDS}

    @classmethod
    def from_json(cls, packed: dict[str, str]) -> Fingerprint:
        """The inverse of `as_json`."""
        return cls(**{name: from_base64(packed[name], kind) for name, kind in _KINDS.items()})


@dataclass(frozen=True)
class Sketch:
    """Of P gradients: `norms` (P,), and `samples` (S,) of them all; NaN for those that are None."""

    norms: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]

    def as_json(self) -> dict[str, str]:
        return {name: as_base64(getattr(self, name)) for name in ("norms", "samples")}

    @classmethod
    def from_json(cls, packed: dict[str, str]) -> Sketch:
        """The inverse of `as_json`."""
        return cls(*(from_base64(packed[name], np.float64) for name in ("norms", "samples")))


_KINDS: Final = {"hashes": np.int64, "norms": np.float64, "samples": np.float64}


def as_base64(numbers: np.ndarray[Any, Any]) -> str:
    """The bytes of an array, for JSON."""
    return base64.b64encode(numbers.tobytes()).decode()


def from_base64(data: str, kind: Any) -> np.ndarray[Any, Any]:
    """The inverse of `as_base64`, for numbers of `kind`; one dimension."""
    return np.frombuffer(base64.b64decode(data), dtype=kind)


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
