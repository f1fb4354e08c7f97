# SPDX-License-Identifier: Apache-2.0
"""What a program changes on its loader counts when it would count in torch.

A buffer that is filled, or a sampler that is set, before the first batch is read; a `collate_fn`, a
sampler or a `drop_last` that is replaced between two passes; priorities that change in each step:
`lockstep.data.sharded_loader` and `lockstep.data.global_batches`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from harness import run_ranks
from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, shard_loader
from lockstep.errors import DataOrderError
from sharing import plain

ALONE = ShardAssignment(1, range(1), 0)


class Window(Sampler[int]):
    """Eight rows, from one that the program moves; counts how often it is iterated."""

    def __init__(self) -> None:
        self.first = self.iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        return iter(range(self.first, self.first + 8))

    def __len__(self) -> int:
        return 8


class Buffer(IterableDataset[int]):
    def __init__(self) -> None:
        self.rows = list(range(8))

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


def moved(sampler: Window) -> None:
    sampler.first = 8


def filled(buffer: Buffer) -> None:
    buffer.rows = [*buffer.rows, *range(8, 16)]


def grown(rows: list[int]) -> None:
    rows += range(8, 16)


def sampled() -> tuple[DataLoader[Any], Any]:
    sampler = Window()
    return DataLoader(range(16), 2, sampler=sampler), sampler


def streamed() -> tuple[DataLoader[Any], Any]:
    buffer = Buffer()
    return DataLoader(buffer, 2), buffer


def listed() -> tuple[DataLoader[Any], Any]:
    rows = list(range(8))
    return DataLoader(rows, 2), rows


def shuffled() -> tuple[DataLoader[Any], Any]:
    rows = list(range(8))
    return DataLoader(rows, 2, sampler=RandomSampler(rows)), rows


BEFORE_THE_FIRST_BATCH = {
    "a sampler": (sampled, moved, range(8, 16)),
    "a buffer": (streamed, filled, range(16)),
    "a list": (listed, grown, range(16)),
    "a shuffled list": (shuffled, grown, range(16)),
}


@pytest.mark.parametrize("case", BEFORE_THE_FIRST_BATCH)
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_set_before_the_first_batch_holds_in_the_first_epoch(case: str, count: int) -> None:
    """On one rank it did; on two the first epoch was what the loader held in the call."""
    make, change, expected = BEFORE_THE_FIRST_BATCH[case]

    def body(group: Any) -> list[int]:
        loader, held = make()
        sharded = shard_loader(loader, group=group)
        change(held)
        return [row for batch in sharded for row in plain(batch)]

    assert sorted(row for rows in run_ranks(count, body) for row in rows) == [*expected]


def test_a_sampler_of_ones_own_is_iterated_once_an_epoch_on_any_number_of_ranks() -> None:
    def body(group: Any) -> int:
        loader, sampler = sampled()
        sharded = shard_loader(loader, group=group)
        assert sampler.iterations == 0
        list(sharded), list(sharded)
        return sampler.iterations

    assert run_ranks(1, body) + run_ranks(2, body) == [2, 2, 2]


def test_samplers_that_differ_between_ranks_are_refused_at_each_first_batch() -> None:
    def body(group: Any) -> None:
        loader, sampler = sampled()
        sharded = shard_loader(loader, group=group)
        sampler.first = group.rank
        for _ in range(2):
            with pytest.raises(DataOrderError, match="first global batches"):
                next(iter(sharded))
        sampler.first = 0
        next(iter(sharded))

    run_ranks(2, body)


def rows_of(loader: Any) -> list[list[int]]:
    return [plain(batch) for batch in loader]


def by_trainer(loader: DataLoader[Any]) -> Callable[[], list[list[int]]]:
    sharded = ShardedLoader(loader, ALONE, parts=BatchParts.JOINT)
    return lambda: [plain(step.parts[0].batch) for step in sharded.batches(0)]


def by_rank(loader: DataLoader[Any]) -> Callable[[], list[list[int]]]:
    sharded = shard_loader(loader)
    return lambda: rows_of(sharded)


def negated(rows: list[int]) -> torch.Tensor:
    return -torch.tensor(rows)


def other_collate(loader: DataLoader[Any]) -> None:
    loader.collate_fn = negated


def other_sampler(loader: DataLoader[Any]) -> None:
    loader.batch_sampler.sampler = range(6, -1, -1)


def without_rest(loader: DataLoader[Any]) -> None:
    loader.batch_sampler.drop_last = True


@pytest.mark.parametrize("read_by", [by_trainer, by_rank])
@pytest.mark.parametrize("change", [other_collate, other_sampler, without_rest])
def test_what_is_replaced_on_the_loader_counts_from_the_next_pass_on(
    change: Callable[[DataLoader[Any]], None], read_by: Callable[..., Any]
) -> None:
    """It changed nothing, and nothing said so."""
    loader = DataLoader(range(7), batch_size=2)
    read = read_by(loader)
    before = read()
    assert before == rows_of(loader)
    change(loader)
    assert read() == rows_of(loader) != before


def test_a_pass_goes_on_as_it_began_whatever_is_replaced_meanwhile() -> None:
    loader = DataLoader(range(7), batch_size=2)
    sharded = shard_loader(loader)
    expected, got = rows_of(loader), []
    for batch in sharded:
        other_collate(loader), without_rest(loader)
        assert len(sharded) == 4
        got.append(plain(batch))
    assert got == expected
    assert len(sharded) == 3


class Prioritised(Sampler[int]):
    """Draws the row of the highest priority, which the program sets."""

    def __init__(self) -> None:
        self.priorities = torch.arange(40.0)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield int(self.priorities.argmax())

    def __len__(self) -> int:
        return 12


def by_samples(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(range(40), batch_size=2, sampler=sampler)


class Batches(BatchSampler):
    """A class of its own, so that its batches are items."""


def by_batches(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(range(40), batch_sampler=Batches(sampler, 2, drop_last=False))


def by_lists(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(
        torch.arange(40), batch_size=None, sampler=BatchSampler(sampler, 2, drop_last=False)
    )


@pytest.mark.parametrize("make", [by_samples, by_batches, by_lists])
def test_priorities_that_a_step_sets_act_from_the_next_batch_on(
    make: Callable[[Sampler[int]], DataLoader[Any]],
) -> None:
    """They acted 256 draws later."""

    def read(share: Callable[[DataLoader[Any]], Any]) -> list[list[int]]:
        sampler, drawn = Prioritised(), []
        for batch in share(make(sampler)):
            drawn.append(plain(batch))
            sampler.priorities[drawn[-1]] = -1.0
        return drawn

    assert read(shard_loader) == read(lambda loader: loader) == [[n, n] for n in range(39, 33, -1)]


def test_a_loaders_processes_read_ahead_as_far_as_torchs_do() -> None:
    def read(share: Callable[[DataLoader[Any]], Any]) -> list[list[int]]:
        sampler, drawn = Prioritised(), []
        for batch in share(DataLoader(range(40), 2, sampler=sampler, num_workers=1)):
            drawn.append(plain(batch))
            sampler.priorities[drawn[-1]] = -1.0
        return drawn

    assert read(shard_loader) == read(lambda loader: loader)
