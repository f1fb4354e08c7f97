# SPDX-License-Identifier: Apache-2.0
"""A shuffled order of samples that can be read from any position and is not held in memory.

``torch.randperm`` of 10^8 samples takes seconds and 800 MB on every worker, again at every
epoch and at every resume. Above `TABLE_LIMIT` each index is instead computed when it is
read: a Feistel network with alternating halves is a bijection on ``[0, 2**bits)`` whatever
its round function; values that fall outside ``[0, n)`` go through the network again until they
fall inside ("cycle walking"), which leaves a bijection on ``[0, n)``. ``2**bits < 2 n``, so less
than two passes are expected.

Below the limit a Feistel network has too few inner states to shuffle well (it cannot reach
most permutations of ten elements), so the samples are sorted by a 64-bit hash each. Neither way
uses a library's generator: the order of a run does not change with a release of numpy.

Sources: J. Black, P. Rogaway, "Ciphers with arbitrary finite domains" (2002) for the walk;
https://prng.di.unimi.it/splitmix64.c for the mixing constants.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

TABLE_LIMIT: Final = 1 << 16
"""Up to this many elements a permutation is a table (512 KB)."""

_ROUNDS: Final = 8
_BLOCK: Final = 4096
"""Positions that are computed in one call of numpy, so that the call's own cost hardly counts."""


def _mix(words: Words) -> Words:
    """Scatter the bits of every word (a bijection on 64 bits)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Permutation:
    """A permutation of `size` elements, a function of `seed`.

    Args:
        size: number of elements, at least 1.
        seed: in [0, 2**63).
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._table: Words | None = None
        self._keys = [np.uint64(derive_seed(seed, "round", number)) for number in range(_ROUNDS)]
        if size <= TABLE_LIMIT:
            positions = np.arange(size, dtype=np.uint64)
            hashes = _mix(_mix(positions + self._keys[0]) + self._keys[1])
            self._table = np.argsort(hashes, kind="stable").astype(np.uint64)
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    def at(self, positions: Words) -> Words:
        """The elements at `positions` (each below `size`), shape (n,) to shape (n,)."""
        if self._table is not None:
            return self._table[positions]
        values = self._scramble(positions)
        outside = np.flatnonzero(values >= self._size)
        while outside.size:
            values[outside] = self._scramble(values[outside])
            outside = outside[values[outside] >= self._size]
        return values

    def _scramble(self, values: Words) -> Words:
        low, high = values & self._low_mask, values >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_mix(high + key) & self._low_mask)
            else:
                high = high ^ (_mix(low + key) & self._high_mask)
        return (high << self._low_bits) | low


class ShuffledOrder:
    """`length` draws from `population` elements, none of which is drawn twice in one lap.

    Args:
        population: number of elements.
        length: number of draws; beyond `population` a fresh permutation begins.
        seed: in [0, 2**63).
    """

    def __init__(self, population: int, length: int, seed: int) -> None:
        self._population = population
        self._length = length
        self._seed = seed
        self._lap = lru_cache(maxsize=2)(self._make_lap)
        self._block = lru_cache(maxsize=2)(self._make_block)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> list[int]:
        """The indices at positions `start` to `stop` of the order."""
        indices: list[int] = []
        while start < stop:
            number, offset = divmod(start, _BLOCK)
            part = self._block(number)[offset : offset + stop - start]
            indices += part
            start += len(part)
        return indices

    def _make_lap(self, number: int) -> Permutation:
        return Permutation(self._population, derive_seed(self._seed, "lap", number))

    def _make_block(self, number: int) -> list[int]:
        start, stop = number * _BLOCK, min((number + 1) * _BLOCK, self._length)
        block: list[int] = []
        while start < stop:
            lap, offset = divmod(start, self._population)
            end = min(stop, (lap + 1) * self._population)
            positions = np.arange(offset, offset + end - start, dtype=np.uint64)
            block += self._lap(lap).at(positions).tolist()
            start = end
        return block
