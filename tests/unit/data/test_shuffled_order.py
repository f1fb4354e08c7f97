# SPDX-License-Identifier: Apache-2.0
"""The shuffled order is a permutation, is well mixed, and can be read from any position."""

import itertools
import time

import numpy as np
import pytest

from lockstep.data.shuffled_order import TABLE_LIMIT, Permutation, ShuffledOrder

LARGE = [TABLE_LIMIT + 1, 100_003, 131_072, 131_073, 200_000]


def _whole(size: int, seed: int) -> np.ndarray:
    return Permutation(size, seed).at(np.arange(size, dtype=np.uint64)).astype(np.int64)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 4096, TABLE_LIMIT, *LARGE])
def test_it_is_a_permutation(size: int) -> None:
    for seed in (0, 1):
        assert np.array_equal(np.sort(_whole(size, seed)), np.arange(size))


def test_it_depends_on_the_seed_alone() -> None:
    for size in (97, LARGE[1]):
        assert np.array_equal(_whole(size, 5), _whole(size, 5))
        assert np.mean(_whole(size, 5) == _whole(size, 6)) < 0.05


def test_every_order_of_four_is_equally_likely() -> None:
    """Chi-square of 24 cells over 4800 seeds: 23 expected, 49.7 is the 0.1 % point."""
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for seed in range(4800):
        counts[tuple(_whole(4, seed))] += 1
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 49.7


@pytest.mark.parametrize("size", LARGE)
def test_where_an_element_lands_tells_nothing_about_it(size: int) -> None:
    order = _whole(size, 3)
    cells, _, _ = np.histogram2d(np.arange(size), order, bins=16)
    expected = size / 256
    # 225 degrees of freedom: 310.4 is the 0.01 % point.
    assert ((cells - expected) ** 2 / expected).sum() < 310.4
    limit = 4 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < limit
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < limit
    assert abs(np.corrcoef(order, _whole(size, 4))[0, 1]) < limit
    # Of a random permutation one point is fixed on average; neighbours rarely stay so.
    assert np.count_nonzero(order == np.arange(size)) < 10
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 12


@pytest.mark.parametrize("size", LARGE)
def test_low_bits_are_mixed(size: int) -> None:
    """A batch of consecutive positions must not hold only even, or only early, samples."""
    order = _whole(size, 7)
    for bit in range(8):
        ones = (order >> bit) & 1
        batches = ones[: size // 64 * 64].reshape(-1, 64).sum(axis=1)
        assert abs(batches.mean() - 32) < 0.5
        assert 12 < batches.var() < 20  # 16 for fair coins


def test_the_order_can_be_entered_anywhere() -> None:
    for population, length in ((10, 10), (10, 37), (LARGE[0], 9000), (5, 3)):
        order = ShuffledOrder(population, length, 11)
        whole = order.read(0, length)
        assert len(whole) == len(order) == length
        for start in (0, 1, length // 2, length - 1):
            assert ShuffledOrder(population, length, 11).read(start, length) == whole[start:]
        if length >= population:
            assert sorted(whole[:population]) == list(range(population))
    laps = ShuffledOrder(50, 100, 0).read(0, 100)
    assert laps[:50] != laps[50:]


def test_a_hundred_million_samples_cost_nothing() -> None:
    before = time.process_time()
    indices = ShuffledOrder(10**8, 10**8, 0).read(73_000_000, 73_000_256)
    assert len(set(indices)) == 256
    assert max(indices) < 10**8
    assert time.process_time() - before < 1.0  # torch.randperm: about 10 s
