# SPDX-License-Identifier: Apache-2.0
"""Iterable data: every rank reads its part of one stream, or the loader is refused with the reason.

`lockstep.data.global_batches` reads or refuses the stream, `lockstep.data.data_order_check`
compares the ranks.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, check_same_plan, shard_loader
from lockstep.errors import DataOrderError, NotShardableError, WrongTypeError
from sharing import by_shard, plain, samples, shard_assignments, share_out

ALONE = ShardAssignment(1, range(1), 0)


class Stream(IterableDataset):
    """Shuffles itself with the global generator, as streams do; counts what is collated."""

    def __init__(self, length: int = 23, first: int = 0) -> None:
        self.length = length
        self.first = first
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> object:
        order = list(range(self.first, self.first + self.length))
        random.shuffle(order)
        for value in order:
            yield torch.tensor([value, int(torch.randint(0, 10**6, ()))])


def test_a_stream_is_shared_out_exactly() -> None:
    """Every rank used to train on the whole stream, unsharded and unwarned."""

    def make() -> DataLoader:
        return DataLoader(Stream(), batch_size=2)

    alone = by_shard(share_out(make, 3, 1))
    assert sorted(row[0] for batch in alone.values() for row in batch) == list(range(23))
    for num_workers in (2, 3):
        torch.manual_seed(num_workers), random.seed(num_workers)
        assert by_shard(share_out(make, 3, num_workers)) == alone
    assert by_shard(share_out(make, 3, 1, epoch=1)) != alone
    assert [s.num_samples for s in share_out(make, 3, 1)[0]] == [6, 6, 6, 5]


def test_a_stream_can_be_resumed() -> None:
    def make() -> DataLoader:
        return DataLoader(Stream(), batch_size=2)

    whole = by_shard(share_out(make, 3, 1))
    for start in (1, 3, 5):
        rest = by_shard(share_out(make, 3, 1, start_step=start))
        assert rest == {key: value for key, value in whole.items() if key[0] >= start}


class Noise:
    """An augmentation with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)


class Noisy(IterableDataset):
    def __init__(self) -> None:
        self.steps = [Noise()]

    def __iter__(self) -> object:
        return (torch.tensor([n, int(self.steps[0].rng.integers(10**6))]) for n in range(23))


@pytest.mark.parametrize("start", [0, 3])
def test_a_generator_within_a_stream_is_seeded_for_each_epoch(start: int) -> None:
    """A resume in a later epoch drew the first epoch's numbers, and so did a worker that joins."""

    def make() -> DataLoader:
        return DataLoader(Noisy(), batch_size=2)

    kept = make()
    epochs = [by_shard(share_out(lambda: kept, 3, 1, epoch=epoch)) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    rest = by_shard(share_out(make, 3, 1, epoch=2, start_step=start))
    assert rest == {key: value for key, value in epochs[2].items() if key[0] >= start}


def test_a_generator_within_a_stream_is_not_disturbed_by_other_draws() -> None:
    loader = DataLoader(Noisy(), batch_size=2)
    sharded = ShardedLoader(loader, ALONE, parts=BatchParts.JOINT)
    undisturbed = [plain(step.parts[0].batch) for step in sharded.batches(1)]
    outside = loader.dataset.steps[0].rng
    drawn = [outside.integers(10**6) for _ in sharded.batches(1)]
    assert drawn == np.random.default_rng(0).integers(10**6, size=12).tolist()
    disturbed = []
    for step in sharded.batches(1):
        disturbed.append(plain(step.parts[0].batch))
        outside.integers(10**6)
    assert disturbed == undisturbed


def test_only_a_workers_own_part_is_collated() -> None:
    collated: list[int] = []

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        collated.extend(int(row[0]) for row in rows)
        return torch.stack(rows)

    loader = DataLoader(Stream(), batch_size=2, collate_fn=collate, drop_last=True)
    sharded = ShardedLoader(loader, shard_assignments(3, 3)[1], parts=BatchParts.JOINT_OR_BORROWED)
    steps = list(sharded.batches(0))
    assert len(steps) == 3  # 23 samples, 6 a step: the incomplete one is dropped
    assert collated == [row[0] for step in steps for row in plain(step.parts[0].batch)]
    assert loader.dataset.epochs == [0]


def test_steps_of_a_stream_are_known_if_it_has_a_length() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.length

    for dataset, steps in ((Stream(), None), (Sized(), 4)):
        loader = DataLoader(dataset, batch_size=2)
        sharded = ShardedLoader(
            loader, shard_assignments(3, 1)[0], parts=BatchParts.JOINT_OR_BORROWED
        )
        assert sharded.steps_per_epoch == steps


def test_an_endless_stream_gives_as_many_steps_as_are_asked_for() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> object:
            number = 0
            while True:
                yield number
                number += 1

    loader = DataLoader(Endless(), batch_size=2)
    steps = ShardedLoader(loader, shard_assignments(2, 2)[1], parts=BatchParts.BY_SHARD).batches(0)
    assert [plain(next(steps).parts[0].batch) for _ in range(3)] == [[2, 3], [6, 7], [10, 11]]
    steps.close()


def test_a_stream_of_ready_batches_is_dealt() -> None:
    class Ready(IterableDataset):
        def __iter__(self) -> object:
            return (torch.full((n + 1,), n) for n in range(5))

    workers = share_out(lambda: DataLoader(Ready(), batch_size=None), 2, 2)
    assert [[p.num_samples for s in steps for p in s.parts] for steps in workers] == [
        [1, 3, 5],
        [2, 4],
    ]


def test_a_list_of_batches_is_dealt() -> None:
    batches = [(torch.arange(n) + 10 * n, torch.ones(n)) for n in (3, 2, 1, 4, 2)]
    for make in (lambda: batches, lambda: tuple(batches)):
        workers = share_out(make, 2, 2)
        dealt = by_shard(workers)
        assert [dealt[key] for key in sorted(dealt)] == [plain(batch) for batch in batches]
        assert [s.num_samples for s in workers[1]] == [5, 5, 2]
        (joined,) = share_out(make, 2, 1, joint=True)
        assert plain(joined[0].parts[0].batch[0]) == [30, 31, 32, 20, 21]
        borrowed = share_out(make, 2, 2, joint=True, borrow=True)[1][2].parts[0]
        assert (borrowed.num_samples, plain(borrowed.batch[0])) == (0, [20, 21])
    sharded = ShardedLoader(batches, shard_assignments(2, 1)[0], parts=BatchParts.JOINT_OR_BORROWED)
    assert (sharded.steps_per_epoch, sharded.global_batch_size) == (3, None)


def test_an_object_that_shuffles_in_iter_is_the_same_everywhere() -> None:
    class Batches:
        def __iter__(self) -> object:
            order = torch.randperm(8).tolist()
            return iter([torch.tensor([value]) for value in order])

    alone = share_out(Batches, 2, 1)
    torch.manual_seed(99)
    assert by_shard(share_out(Batches, 2, 2)) == by_shard(alone)
    assert sorted(samples(alone)) == list(range(8))
    assert by_shard(share_out(Batches, 2, 2, epoch=1)) != by_shard(alone)


class _Map(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


REFUSED = {
    "stream with loader workers": (
        lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
        NotShardableError,
        r"each loader worker reads the stream(?s:.*)num_workers=0",
    ),
    "distributed sampler": (
        lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0)),
        NotShardableError,
        r"num_replicas=2(?s:.*)add_dist_sampler=False",
    ),
    "generator": (lambda: (n for n in range(3)), NotShardableError, "read only once"),
    "iterator": (lambda: iter([torch.ones(1)]), NotShardableError, "returns a new iterator"),
    "dataset": (_Map, WrongTypeError, "DataLoader"),
    "dictionary": (lambda: {"x": torch.ones(3)}, WrongTypeError, "got *a dict"),
    "number": (lambda: 5, WrongTypeError, "not a loader"),
    "one rank's part": (lambda: shard_loader([torch.ones(1)]), NotShardableError, "itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_refused(name: str) -> None:
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        ShardedLoader(make(), ALONE, parts=BatchParts.BY_SHARD)


def test_a_distributed_sampler_over_one_replica_is_an_ordinary_one() -> None:
    sampler = DistributedSampler(range(12), 1, 0, shuffle=True)

    def make() -> DataLoader:
        return DataLoader(range(12), batch_size=2, sampler=sampler)

    first, second = samples(share_out(make, 2, 2)), samples(share_out(make, 2, 2, epoch=1))
    assert first != second  # set_epoch was called
    assert sorted(first) == list(range(12))


def _fingerprints(*makers: object) -> list[dict]:
    return [
        ShardedLoader(make(), assignment, parts=BatchParts.JOINT_OR_BORROWED).fingerprint(0)
        for make, assignment in zip(
            makers, shard_assignments(len(makers), len(makers)), strict=True
        )
    ]


def test_workers_that_read_alike_agree() -> None:
    generator = torch.Generator()
    for make in (
        lambda: DataLoader(range(9), batch_size=2, shuffle=True),
        lambda: DataLoader(range(9), batch_size=2, shuffle=True, generator=generator),
        lambda: DataLoader(Stream(), batch_size=2),
        lambda: DataLoader(range(4), batch_sampler=[torch.tensor([0, 1]), [2, 3]]),
        lambda: [torch.ones(2), torch.zeros(1)],
    ):
        prints = _fingerprints(make, make)
        check_same_plan(prints)
        assert prints[0]["first_batch"] is not None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: DataLoader(range(10), batch_size=2, shuffle=True), "lengths of the data"),
        (lambda: DataLoader(range(9), batch_size=3, shuffle=True), "global batch sizes"),
        (lambda: DataLoader(range(9), batch_size=2), "first global batches"),
        (
            lambda: DataLoader(
                range(9), 2, shuffle=True, generator=torch.Generator().manual_seed(1)
            ),
            "first global batches",
        ),
        (lambda: DataLoader(Stream(9), batch_size=2), "kinds of loaders"),
    ],
)
def test_workers_that_read_otherwise_are_named(other: object, words: str) -> None:
    def usual() -> DataLoader:
        return DataLoader(range(9), batch_size=2, shuffle=True)

    with pytest.raises(DataOrderError, match=words) as caught:
        check_same_plan(_fingerprints(usual, usual, other))
    assert "rank(s) 2 against rank 0" in str(caught.value)


def test_a_stream_that_reads_only_this_ranks_part_is_noticed() -> None:
    """Such a stream would be cut twice, and most of it read by nobody."""
    with pytest.raises(DataOrderError, match="first global batches"):
        check_same_plan(
            _fingerprints(
                lambda: DataLoader(Stream(10), batch_size=2),
                lambda: DataLoader(Stream(10, first=10), batch_size=2),
            )
        )
