# SPDX-License-Identifier: Apache-2.0
"""Every sample is read once at any numbers of samples, shards and workers, in the same shards."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, split_batch_size
from lockstep.data.isolated_randomness import IsolatedRandomness
from lockstep.errors import ConfigurationError
from sharing import by_shard, plain, samples, shard_assignments, share_out

SIZES = [1, 2, 5, 10, 37]
SHARDS = [1, 2, 3, 4, 7]
BATCHES = [1, 3, 12]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_every_sample_is_seen_once(shuffle: bool, joint: bool) -> None:
    """A padding sampler drew 12 samples of 10 for 3 ranks; two of them counted twice."""
    for size, num_shards, whole in itertools.product(SIZES, SHARDS, BATCHES):
        for num_workers in {1, 2, num_shards}:

            def make(size: int = size, n: int = num_shards, whole: int = whole) -> DataLoader:
                share = split_batch_size(whole, n, 0)
                return DataLoader(range(size), batch_size=share, shuffle=shuffle)

            workers = share_out(make, num_shards, num_workers, joint=joint, borrow=True)
            assert sorted(samples(workers)) == list(range(size))
            for steps in workers:
                assert [step.index for step in steps] == list(range(-(-size // whole)))
                assert sum(step.num_samples for step in steps) == size
            for same_step in zip(*workers, strict=True):
                own = [part.num_samples for step in same_step for part in step.parts]
                assert sum(own) == same_step[0].num_samples


class Counting(Sampler):
    """Gives another order each time."""

    def __init__(self):
        self.iterations = 0

    def __iter__(self):
        self.iterations += 1
        yield from torch.arange(8).roll(self.iterations - 1).tolist()

    def __len__(self):
        return 8


def test_a_sampler_is_iterated_once_an_epoch_however_many_ranks_compare_their_plans() -> None:
    sampler = Counting()
    loader = ShardedLoader(
        DataLoader(range(8), batch_size=2, sampler=sampler),
        ShardAssignment(1, range(1), seed=0),
        parts=BatchParts.BY_SHARD,
    )
    for epoch in range(2):
        loader.fingerprint(epoch)
        assert samples([list(loader.batches(epoch))]) == torch.arange(8).roll(epoch).tolist()
    assert sampler.iterations == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_may_grow_between_the_comparison_and_the_read(shuffle: bool) -> None:
    rows = list(range(8))
    loader = ShardedLoader(
        DataLoader(rows, batch_size=2, shuffle=shuffle),
        ShardAssignment(1, range(1), seed=0),
        parts=BatchParts.BY_SHARD,
    )
    loader.fingerprint(0)
    rows += range(8, 16)
    assert sorted(samples([list(loader.batches(0))])) == list(range(16))


@pytest.mark.parametrize("start_step", [1, 7, 8, 100, 199, 200, 300])
def test_what_lies_before_the_position_is_skipped_at_once(
    start_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took an entry into the samplers' random states for each global batch."""
    entries: list[int] = []
    draw = IsolatedRandomness.draw

    def counted(self: IsolatedRandomness, iterator: Iterator[int], count: int) -> list[int]:
        entries.append(count)
        return draw(self, iterator, count)

    class Own(Sampler):
        def __iter__(self):
            return (number for number in torch.randperm(400).tolist())

        def __len__(self):
            return 400

    def read(start: int) -> tuple[list[int], object]:
        loader = ShardedLoader(
            DataLoader(range(400), batch_size=2, sampler=Own()),
            ShardAssignment(1, range(1), seed=0),
            parts=BatchParts.BY_SHARD,
        )
        rows = [row for step in loader.batches(0, start) for row in plain(step.parts[0].batch)]
        return rows, loader.first_items

    whole, began = read(0)
    monkeypatch.setattr(IsolatedRandomness, "draw", counted)
    assert read(start_step) == (whole[2 * start_step :], began)
    assert len(entries) <= 3 + max(0, 200 - start_step)


def test_unshuffled_data_stays_in_order() -> None:
    """The old sampler shuffled whatever the user said, validation data too."""
    for num_shards in SHARDS:
        workers = share_out(lambda: DataLoader(range(37), batch_size=4), num_shards, 1)
        assert samples(workers) == list(range(37))


def test_batch_size_is_per_shard_and_the_tail_is_balanced() -> None:
    workers = share_out(lambda: DataLoader(range(22), batch_size=5), 3, 3)
    assert [[len(s.parts[0].batch) for s in steps] for steps in workers] == [[5, 3], [5, 2], [5, 2]]
    assert [s.num_samples for s in workers[0]] == [15, 7]


def test_the_whole_is_cut_exactly() -> None:
    workers = share_out(lambda: DataLoader(range(42), batch_size=split_batch_size(21, 2, 0)), 2, 2)
    assert [[p.num_samples for s in steps for p in s.parts] for steps in workers] == [
        [11, 11],
        [10, 10],
    ]


def test_a_resize_keeps_the_global_batch() -> None:
    """100 over 8, 3, 7 and 2 workers stays 100, to the sample."""
    for num_shards in (8, 3, 7, 2):
        share = split_batch_size(100, num_shards, num_shards - 1)
        loader = DataLoader(range(300), batch_size=share)
        sharded = ShardedLoader(loader, shard_assignments(num_shards, 1)[0], parts=BatchParts.JOINT)
        assert sharded.global_batch_size == 100
        assert [step.num_samples for step in sharded.batches(0)] == [100, 100, 100]


def test_any_number_of_workers_reads_the_same_shards() -> None:
    def make() -> DataLoader:
        return DataLoader(range(62), batch_size=4, shuffle=True)

    alone = by_shard(share_out(make, 4, 1, epoch=2))
    assert len(alone) == 4 * 4
    for num_workers in (2, 3, 4, 6):
        assert by_shard(share_out(make, 4, num_workers, epoch=2)) == alone


def test_joint_parts_hold_the_shards_in_order() -> None:
    def make() -> DataLoader:
        return DataLoader(range(62), batch_size=4, shuffle=True)

    for num_workers in (1, 2, 4):
        apart = share_out(make, 4, num_workers)
        joined = share_out(make, 4, num_workers, joint=True)
        for steps, whole in zip(apart, joined, strict=True):
            for one, other in zip(steps, whole, strict=True):
                (part,) = other.parts
                assert plain(part.batch) == [v for p in one.parts for v in plain(p.batch)]
                assert part.shards == tuple(p.shards[0] for p in one.parts)


def test_reshuffled_every_epoch_by_seed_and_epoch() -> None:
    """The old epochs repeated one order unless somebody called set_epoch."""

    def make() -> DataLoader:
        return DataLoader(range(40), batch_size=4, shuffle=True)

    sharded = ShardedLoader(make(), ShardAssignment(2, range(2), 5), parts=BatchParts.JOINT)

    def order(epoch: int) -> list[int]:
        return [v for step in sharded.batches(epoch) for v in plain(step.parts[0].batch)]

    first, second = order(0), order(1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(40))
    assert order(0) == first
    assert samples(share_out(make, 2, 1, joint=True, seed=6)) != first


@pytest.mark.parametrize("start_step", [0, 1, 3, 4, 9])
def test_a_later_start_yields_what_the_whole_run_yields(start_step: int) -> None:
    read: list[int] = []

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 37

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    for shuffle in (False, True):
        sharded = ShardedLoader(
            DataLoader(Data(), batch_size=3, shuffle=shuffle),
            ShardAssignment(3, range(1, 3), 0),
            parts=BatchParts.JOINT_OR_BORROWED,
        )
        whole = [(s.index, plain(s.parts[0].batch)) for s in sharded.batches(1)]
        read.clear()
        rest = [(s.index, plain(s.parts[0].batch)) for s in sharded.batches(1, start_step)]
        assert rest == whole[start_step:]
        assert len(read) == sum(len(batch) for _, batch in rest)


def test_fewer_samples_than_workers() -> None:
    """With a batch size of 0 every worker read the whole batch; now some read nothing."""

    def make() -> DataLoader:
        return DataLoader(range(4), batch_size=split_batch_size(2, 3, 0))

    workers = share_out(make, 3, 3)
    assert [[len(step.parts) for step in steps] for steps in workers] == [[1, 1], [1, 1], [0, 0]]
    assert sorted(samples(workers)) == [0, 1, 2, 3]


def test_a_worker_without_samples_borrows_those_of_shard_0() -> None:
    def make() -> DataLoader:
        return DataLoader(range(9), batch_size=2, shuffle=True)

    workers = share_out(make, 4, 4, joint=True, borrow=True)
    (borrowed,), (lender,) = workers[3][1].parts, workers[0][1].parts
    assert (borrowed.num_samples, borrowed.shards) == (0, (3,))
    assert plain(borrowed.batch) == plain(lender.batch)
    assert [s.num_samples for s in workers[3]] == [8, 1]
    assert [len(s.parts) for s in share_out(make, 4, 4, joint=True)[3]] == [1, 0]
    spare = share_out(make, 2, 3, joint=True, borrow=True)[0]
    assert [p.num_samples for s in spare for p in s.parts] == [0, 0, 0]


def test_drop_last_drops_an_incomplete_global_batch() -> None:
    for num_workers in (1, 3):
        workers = share_out(
            lambda: DataLoader(range(22), batch_size=5, drop_last=True), 3, num_workers
        )
        assert [step.num_samples for step in workers[0]] == [15]
        assert sorted(samples(workers)) == list(range(15))
    exact = share_out(lambda: DataLoader(range(30), batch_size=5, drop_last=True), 3, 1)
    assert len(exact[0]) == 2
    assert share_out(lambda: DataLoader(range(9), batch_size=5, drop_last=True), 2, 1) == [[]]


def test_steps_per_epoch() -> None:
    for size, drop_last in itertools.product((1, 8, 9, 16), (False, True)):
        loader = DataLoader(range(size), batch_size=4, drop_last=drop_last)
        sharded = ShardedLoader(loader, ShardAssignment(2, range(2), 0), parts=BatchParts.BY_SHARD)
        assert sharded.steps_per_epoch == len(list(sharded.batches(0)))


@pytest.mark.parametrize("shards", [range(3), range(-1, 1), range(0, 2, 2)])
def test_shards_that_do_not_exist_are_refused(shards: range) -> None:
    with pytest.raises(ConfigurationError, match="contiguous range"):
        ShardAssignment(2, shards, 0)


def test_every_worker_knows_of_a_step_in_which_shards_are_empty() -> None:
    """Two samples are left for four shards, and one of three workers has none of them."""
    workers = share_out(lambda: DataLoader(range(10), batch_size=2), 4, 3)
    for steps in workers:
        assert [step.has_empty_shards for step in steps] == [False, True]


class ReadsSequences(Dataset):
    """Is asked for a list of sequences at once, and gives their time steps first."""

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = [torch.ones(3 + index, 2) for index in indices]
        return pad_sequence(sequences), torch.tensor(indices)


def test_a_batch_of_time_steps_first_counts_for_the_samples_that_were_asked_for() -> None:
    def make() -> DataLoader:
        lists = BatchSampler(range(6), 2, drop_last=False)
        return DataLoader(ReadsSequences(), batch_size=None, sampler=lists)

    workers = share_out(make, 2, 2)
    assert [[p.num_samples for s in steps for p in s.parts] for steps in workers] == [[2, 2], [2]]
