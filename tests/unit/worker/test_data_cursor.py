# SPDX-License-Identifier: Apache-2.0
"""`Cursor`: where an epoch ends, if a `__len__` of the user's is right, too small or too large; and
when the ranks agree on what they read."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, UserShardedLoader
from lockstep.errors import DataOrderError
from lockstep.group import Group
from lockstep.worker.data_cursor import Cursor

ALONE = ShardAssignment(1, range(1), 0)
TOO_LONG = "more batches than its `__len__` says"


class Stream(IterableDataset):
    """Its passes go on in one stream, as those over a queue or a socket do."""

    def __init__(self, claimed: int, real: int) -> None:
        self.claimed, self.real = claimed, real
        self.numbers = itertools.count()

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> object:
        return itertools.islice(self.numbers, self.real)


class Order(Sampler):
    def __init__(self, claimed: int, real: int) -> None:
        self.claimed, self.real = claimed, real

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> object:
        return iter(range(self.real))


def by_stream(claimed: int, real: int) -> DataLoader:
    return DataLoader(Stream(claimed, real), batch_size=4)


def by_sampler(claimed: int, real: int) -> DataLoader:
    return DataLoader(range(100), batch_size=4, sampler=Order(claimed, real))


def by_batch_sampler(claimed: int, real: int) -> DataLoader:
    class Batches(Order):
        def __len__(self) -> int:
            return -(-self.claimed // 4)

        def __iter__(self) -> object:
            return iter(torch.arange(self.real).split(4))

    return DataLoader(range(100), batch_sampler=Batches(claimed, real))


def sharded(loader: object) -> Cursor:
    return Cursor(ShardedLoader(loader, ALONE, parts=BatchParts.BY_SHARD))


def steps_until_the_end(cursor: Cursor) -> int:
    """As `BatchIterator` goes: it looks for the end after each step that was committed."""
    while not cursor.ends_before(cursor.step):
        assert cursor.take() is not None
        cursor.commit()
    return cursor.step


MAKERS = pytest.mark.parametrize("make", [by_stream, by_sampler, by_batch_sampler])


@MAKERS
def test_what_comes_after_a_length_that_is_too_small_is_refused(make: object) -> None:
    cursor = sharded(make(20, 23))
    with pytest.raises(DataOrderError, match=TOO_LONG):
        steps_until_the_end(cursor)
    assert cursor.step == 5


@MAKERS
def test_the_end_comes_where_the_data_ends_and_not_where_it_should(make: object) -> None:
    assert steps_until_the_end(sharded(make(24, 18))) == 5
    assert steps_until_the_end(sharded(make(20, 20))) == 5
    assert steps_until_the_end(sharded(make(18, 20))) == 5  # no batch is left out


def test_a_users_own_shard_of_the_data_is_not_cut_off() -> None:
    with pytest.raises(DataOrderError, match=TOO_LONG):
        steps_until_the_end(Cursor(UserShardedLoader(by_sampler(20, 23), ALONE)))
    assert steps_until_the_end(Cursor(UserShardedLoader(by_sampler(20, 20), ALONE))) == 5


def test_to_look_for_the_end_takes_nothing_from_the_next_pass() -> None:
    cursor = sharded(by_stream(8, 8))
    seen = []
    for _ in range(3):
        while not cursor.ends_before(cursor.step):
            seen += cursor.take().parts[0].batch.tolist()
            cursor.commit()
        cursor.finish_epoch()
    assert seen == list(range(24))


def test_torchs_own_samplers_are_not_asked() -> None:
    for shuffle in (False, True):
        source = sharded(DataLoader(range(20), batch_size=4, shuffle=shuffle)).source
        assert source.has_exact_length
    assert not sharded(by_sampler(20, 20)).source.has_exact_length


def test_a_position_at_the_end_is_not_looked_behind() -> None:
    """The pass that came to it has looked: nothing is read again after a resume."""
    dataset = Stream(20, 20)
    cursor = sharded(DataLoader(dataset, batch_size=4))
    cursor.move_to(0, 5)
    assert cursor.ends_before(5)
    assert next(dataset.numbers) == 0


def test_a_group_agrees_once_in_an_epoch_wherever_it_begins() -> None:
    class Counting(UserShardedLoader):
        asked = 0

        def agree(self, group: Group, epoch: int) -> None:
            self.asked += 1
            super().agree(group, epoch)

    source = Counting(by_sampler(20, 20), ALONE)
    cursor, asked = Cursor(source), []
    first, second = Group(None), Group(None)

    def agree(group: Group) -> None:
        cursor.agree(group)
        asked.append(source.asked)

    for group in (first, first, second):
        agree(group)
        cursor.take()
        cursor.commit()
    cursor.finish_epoch()
    agree(second)
    cursor.forget_agreement()
    agree(second)
    assert asked == [1, 1, 2, 3, 4]
