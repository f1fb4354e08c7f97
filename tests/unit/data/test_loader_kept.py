# SPDX-License-Identifier: Apache-2.0
"""The user's loader is kept: every field, the subclass, the sampler's own stream.

`lockstep.data.global_batches` reads the loader, `lockstep.data.isolated_randomness` keeps the
random numbers of its sampler, and `lockstep.data.loader_copy` makes a loader like it.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.data.isolated_randomness import IsolatedRandomness, find_generators
from lockstep.errors import NotShardableError
from sharing import by_shard, plain, samples, share_out

ALONE = ShardAssignment(1, range(1), 0)
REPLACED = {"dataset", "batch_sampler", "collate_fn", "_dataset_kind", "_iterator"}


def _collate(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows) * 10


def _start(worker_id: int) -> None:
    torch.set_num_threads(1)


class _SubLoader(DataLoader):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.future_field = object()

    def __iter__(self) -> object:
        for batch in super().__iter__():
            yield batch + 1000


def test_every_field_is_kept() -> None:
    """Rebuilding from ten fields lost generator, prefetch_factor, persistent_workers, ..."""
    loader = _SubLoader(
        range(10),
        batch_size=2,
        sampler=WeightedRandomSampler(torch.ones(10), 8),
        num_workers=1,
        collate_fn=_collate,
        timeout=30,
        worker_init_fn=_start,
        multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(3),
        prefetch_factor=5,
        persistent_workers=True,
        pin_memory=False,
    )
    before = dict(vars(loader))
    sharded = ShardedLoader(loader, ALONE, parts=BatchParts.BY_SHARD)
    made = sharded._copy_of_loader()._loader
    copy = vars(made)
    assert type(made) is _SubLoader
    assert copy.keys() == before.keys()
    for name in before.keys() - REPLACED - {"worker_init_fn"}:
        assert copy[name] is before[name], name
    assert all(vars(loader)[name] is value for name, value in before.items())
    steps = list(sharded.batches(0))
    sharded.close()
    assert all(v % 10 == 0 and v >= 1000 for s in steps for v in plain(s.parts[0].batch))


def test_in_order_false_still_delivers_step_after_step() -> None:
    loader = DataLoader(range(20), batch_size=1, num_workers=2, in_order=False)
    (steps,) = share_out(lambda: loader, 1, 1)
    assert samples([steps]) == list(range(20))


def test_a_weighted_sampler_keeps_its_weights() -> None:
    """It silently became a sampler that draws every sample equally often."""
    weights = torch.zeros(100)
    weights[[7, 8, 9]] = torch.tensor([1.0, 2.0, 7.0])

    def make() -> DataLoader:
        return DataLoader(range(100), batch_size=25, sampler=WeightedRandomSampler(weights, 1000))

    workers = share_out(make, 4, 2)
    drawn = np.bincount(samples(workers), minlength=100)
    assert drawn.sum() == 1000
    assert drawn[[7, 8, 9]].sum() == 1000
    assert abs(drawn[9] - 700) < 60
    assert by_shard(share_out(make, 4, 4)) == by_shard(workers)
    assert by_shard(share_out(make, 4, 2, epoch=1)) != by_shard(workers)


def test_a_random_sampler_keeps_replacement_and_num_samples() -> None:
    def make(**kwargs: object) -> DataLoader:
        return DataLoader(range(50), batch_size=5, sampler=RandomSampler(range(50), **kwargs))

    with_repeats = samples(share_out(lambda: make(replacement=True, num_samples=200), 2, 1))
    assert len(with_repeats) == 200
    assert len(set(np.bincount(with_repeats, minlength=50))) > 1  # not laps of permutations
    fewer = samples(share_out(lambda: make(num_samples=20), 2, 2))
    assert len(set(fewer)) == 20
    more = samples(share_out(lambda: make(num_samples=120), 2, 2))
    assert sorted(more[:50] + more[50:]) == sorted(more)
    assert set(np.bincount(more)) == {2, 3}


def test_a_subclass_of_a_known_sampler_keeps_its_own_order() -> None:
    class Backwards(RandomSampler):
        def __iter__(self) -> object:
            return iter(range(len(self) - 1, -1, -1))

    loader = DataLoader(range(9), batch_size=2, sampler=Backwards(range(9)))
    assert samples(share_out(lambda: loader, 2, 1)) == list(range(8, -1, -1))


class _LazySampler(Sampler):
    """Draws while it is iterated, from four generators, two of them its own."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(2)
        self.legacy = np.random.RandomState(3)
        self.python = random.Random(4)

    def __iter__(self) -> object:
        for _ in range(600):
            yield int(torch.randint(0, 10, ()).item())
            yield int(np.random.randint(10)) + 10 * random.randrange(10)
            yield int(torch.randint(0, 1000, (), generator=self.torch).item())
            yield int(self.numpy.integers(1000))
            yield int(self.legacy.randint(1000))
            yield self.python.randrange(1000)


def test_a_lazy_sampler_draws_the_same_everywhere_and_disturbs_nobody() -> None:
    sampler = _LazySampler()

    def make() -> DataLoader:
        return DataLoader(range(1000), batch_size=50, sampler=sampler)

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    alone = by_shard(share_out(make, 4, 1))
    drawn = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    # Draws of the training step, in between, do not shift the sampler's.
    assignment = ShardAssignment(4, range(4), 0)
    disturbed = {}
    for step in ShardedLoader(make(), assignment, parts=BatchParts.BY_SHARD).batches(0, 3):
        torch.rand(3), np.random.rand(3), random.random(), sampler.numpy.random()
        disturbed[step.index] = [plain(part.batch) for part in step.parts]
    assert disturbed[3] == [alone[3, shard] for shard in range(4)]
    assert disturbed[17] == [alone[17, shard] for shard in range(4)]
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == drawn
    assert by_shard(share_out(make, 4, 1, epoch=1)) != alone


def test_the_users_generator_counts_and_is_left_as_it_was() -> None:
    def make(seed: int, sampler: object = None) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(range(60), batch_size=6, shuffle=True, generator=generator)

    one, other = (
        samples(share_out(lambda: make(1), 2, 1)),
        samples(share_out(lambda: make(2), 2, 1)),
    )
    assert one != other
    loader = make(1)
    state = loader.generator.get_state()
    assert samples(share_out(lambda: loader, 2, 1)) == one
    # Epoch 1 first and epoch 0 again: each is a function of the epoch, not of what was read.
    later = samples(share_out(lambda: loader, 2, 1, epoch=1))
    assert samples(share_out(lambda: loader, 2, 1)) == one != later
    assert torch.equal(loader.generator.get_state(), state)
    subset = DataLoader(
        range(60), batch_size=6, sampler=SubsetRandomSampler(range(30), loader.generator)
    )
    first = samples(share_out(lambda: subset, 2, 1))
    assert samples(share_out(lambda: subset, 2, 2)) != first  # by worker, not by step
    assert sorted(first) == list(range(30))
    assert samples(share_out(lambda: subset, 2, 1)) == first
    assert torch.equal(loader.generator.get_state(), state)


def test_an_error_in_a_sampler_leaves_the_generators_as_they_were() -> None:
    isolation = IsolatedRandomness(1, find_generators(random.Random(1)))
    state = torch.get_rng_state()

    def broken() -> object:
        torch.rand(1)
        raise KeyError("no such index")
        yield

    with pytest.raises(KeyError, match="no such index"):
        isolation.draw(isolation.open(broken()), 5)
    assert torch.equal(torch.get_rng_state(), state)


class _Bucketed(Sampler):
    """A batch sampler of unequal batches, as those that batch by length are."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> object:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_a_custom_batch_sampler_keeps_its_batches() -> None:
    """It became batch_size=None: single samples, not collated."""
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13, 14]]
    sampler = _Bucketed(batches)

    def make() -> DataLoader:
        return DataLoader(range(15), batch_sampler=sampler)

    workers = share_out(make, 3, 3, epoch=4)
    got = by_shard(workers)
    assert [got[key] for key in sorted(got)] == batches
    assert [len(steps) for steps in workers] == [3, 3, 3]
    assert [s.num_samples for s in workers[1]] == [6, 7, 2]
    assert [len(s.parts) for s in workers[1]] == [1, 1, 0]
    assert set(sampler.epochs) == {4}
    joined = share_out(make, 3, 1, joint=True)[0]
    assert [plain(s.parts[0].batch) for s in joined] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11, 12],
        [13, 14],
    ]
    borrowed = share_out(make, 3, 3, joint=True, borrow=True)[2][2].parts[0]
    assert (plain(borrowed.batch), borrowed.num_samples) == ([13, 14], 0)
    resumed = by_shard(share_out(make, 3, 1, start_step=1))
    assert resumed == {key: value for key, value in got.items() if key[0] >= 1}


def test_torchs_own_batch_sampler_is_a_batch_size() -> None:
    def make() -> DataLoader:
        sampler = BatchSampler(SequentialSampler(range(20)), 4, drop_last=True)
        return DataLoader(range(20), batch_sampler=sampler)

    workers = share_out(make, 2, 2)
    assert [s.num_samples for s in workers[0]] == [8, 8]
    assert sorted(samples(workers)) == list(range(16))


def test_batch_size_none_deals_ready_batches() -> None:
    class Ready(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> np.ndarray:
            return np.arange(index + 1) + 10 * index

    def make() -> DataLoader:
        return DataLoader(Ready(), batch_size=None)

    workers = share_out(make, 2, 2)
    assert [[p.num_samples for s in steps for p in s.parts] for steps in workers] == [
        [1, 3, 5],
        [2, 4],
    ]
    assert isinstance(workers[0][0].parts[0].batch, torch.Tensor)  # torch's conversion
    assert [len(steps) for steps in workers] == [3, 3]
    joined = share_out(make, 2, 1, joint=True)[0]
    assert [p.num_samples for s in joined for p in s.parts] == [3, 7, 5]
    assert plain(joined[0].parts[0].batch) == [0, 10, 11]


def test_the_users_getitems_reads_a_whole_shard() -> None:
    calls: list[list[int]] = []

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            raise AssertionError("__getitems__ is there")

        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(indices)
            return [i * 2 for i in indices]

    workers = share_out(lambda: DataLoader(Data(), batch_size=3), 2, 1, joint=True)
    assert calls == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert samples(workers) == list(range(0, 24, 2))


def test_getitems_may_return_a_batch_of_its_own() -> None:
    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    loader = DataLoader(Data(), batch_size=3, collate_fn=lambda batch: batch)
    assert samples(share_out(lambda: loader, 2, 1, joint=True)) == list(range(12))


def test_a_loader_that_returns_other_batches_is_refused() -> None:
    class Cached(DataLoader):
        """Keeps one iterator for its life, as some repeating loaders do."""

        def __iter__(self) -> object:
            if not hasattr(self, "kept"):
                self.kept = super().__iter__()
            return self.kept

    loader = Cached(range(12), batch_size=3)
    iter(loader)
    with pytest.raises(NotShardableError, match="other batches than it was asked for"):
        share_out(lambda: loader, 2, 1)

    class Twice(DataLoader):
        def __iter__(self) -> object:
            return itertools.chain.from_iterable((b, b) for b in super().__iter__())

    with pytest.raises(NotShardableError, match="one batch for each"):
        share_out(lambda: Twice(range(12), batch_size=3), 2, 1)

    class Half(DataLoader):
        def __iter__(self) -> object:
            return itertools.islice(super().__iter__(), None, None, 2)

    with pytest.raises(NotShardableError, match="leaves out"):
        share_out(lambda: Half(range(12), batch_size=3), 2, 1)
