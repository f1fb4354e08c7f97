# SPDX-License-Identifier: Apache-2.0
"""``growth_data.py ours|theirs SAMPLES``: the memory and the time that an order of samples takes.

A shuffled order over a dataset that holds nothing, as one of two workers reads it: until the first
batch, until a batch in the middle of the epoch (a resume), and on average after that.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from footprint import private_mb
from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH_SIZE, NUM_WORKERS, NUM_READ = 32, 2, 200


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def _ours(dataset: Numbers, skip: int) -> Iterator[Any]:
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    assignment = ShardAssignment(NUM_WORKERS, range(1), seed=0)
    return ShardedLoader(loader, assignment, parts=BatchParts.BY_SHARD).batches(0, skip)


def _theirs(dataset: Numbers, skip: int) -> Iterator[Any]:
    sampler = DistributedSampler(dataset, NUM_WORKERS, 0, shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    # torch's loader has no position: a resume reads, and throws away, what came before.
    return islice(iter(loader), skip, None)


def main() -> None:
    side, size = sys.argv[1], int(sys.argv[2])
    make = {"ours": _ours, "theirs": _theirs}[side]
    dataset = Numbers(size)
    before = private_mb()
    start = time.perf_counter()
    batches = make(dataset, 0)
    next(batches)
    first = time.perf_counter() - start
    held = private_mb() - before
    start = time.perf_counter()
    num_read = sum(1 for _ in islice(batches, NUM_READ))
    each = (time.perf_counter() - start) / max(1, num_read)
    start = time.perf_counter()
    next(make(dataset, size // (BATCH_SIZE * NUM_WORKERS) // 2))
    middle = time.perf_counter() - start
    report(mebibytes=held, first=1000 * first, middle=1000 * middle, each=1e6 * each)


if __name__ == "__main__":
    main()
