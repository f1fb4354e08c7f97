# SPDX-License-Identifier: Apache-2.0
"""shard_loader under torchrun: each rank reads its exact part, and any number of ranks resumes."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, random_split

from harness import run_ranks
from lockstep.data import RankLoader, shard_loader
from lockstep.errors import CheckpointError, DataOrderError, NotShardableError
from sharing import plain


class Ranks:
    """Stands for a process group: all that is asked of it is a rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _loader(size: int = 37, batch_size: int = 3, **kwargs: object) -> DataLoader:
    data = TensorDataset(torch.arange(size), torch.arange(size) * 2.0)
    return DataLoader(data, batch_size=batch_size, shuffle=True, **kwargs)


def _ranks(count: int, make: object = _loader, **kwargs: object) -> list[RankLoader]:
    return [shard_loader(make(**kwargs), group=Ranks(rank, count)) for rank in range(count)]


def _epoch(ranks: list[RankLoader]) -> list[list[list[int]]]:
    """By step and rank, the samples."""
    return [[plain(b[0]) for b in step] for step in zip(*ranks, strict=True)]


def _flat(steps: list[list[list[int]]]) -> list[int]:
    return [sample for step in steps for batch in step for sample in batch]


def test_every_sample_once_at_any_number_of_ranks() -> None:
    for size in (1, 2, 3, 4, 5):
        ranks = _ranks(size)
        first, second = _epoch(ranks), _epoch(ranks)
        assert sorted(_flat(first)) == sorted(_flat(second)) == list(range(37))
        assert first != second
        assert [len(rank) for rank in ranks] == [len(first)] * size


def test_a_rank_without_samples_gets_a_batch_of_zero_rows() -> None:
    ranks = _ranks(4, size=13)
    last = [list(rank)[-1] for rank in ranks]
    assert [len(x) for x, _ in last] == [1, 0, 0, 0]
    assert last[3][1].dtype == torch.float32
    assert all(len(list(rank)) == 1 for rank in _ranks(4, size=13, drop_last=True))


def test_what_has_no_empty_version_names_drop_last() -> None:
    def make() -> DataLoader:
        return DataLoader(range(3), batch_size=1, collate_fn=lambda rows: {"rows": object()})

    ranks = _ranks(2, make)
    assert len(list(ranks[0])) == 2
    with pytest.raises(NotShardableError, match="drop_last=True"):
        list(ranks[1])


def test_no_group_is_one_process_and_a_raw_group_is_enough() -> None:
    assert sorted(_flat([[plain(b[0])] for b in shard_loader(_loader())])) == list(range(37))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    assert len(shard_loader(_loader(), group=group)) == 13

    class Properties:
        rank, size = 1, 2

    alike = shard_loader(_loader(), group=Properties())
    assert [plain(b) for b in alike] == [plain(b) for b in _ranks(2)[1]]


def test_set_epoch_and_the_epochs_own_advance() -> None:
    loader, twin = shard_loader(_loader()), shard_loader(_loader())
    epochs = [_epoch([loader]) for _ in range(3)]
    for epoch in (2, 0, 1, 1):
        twin.set_epoch(epoch)
        assert _epoch([twin]) == epochs[epoch]
    # Left early, the next iteration is the next epoch all the same.
    next(iter(twin))
    assert twin.epoch == 2
    assert _epoch([twin]) == _epoch([loader])
    assert loader.fingerprint() == twin.fingerprint()


@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_a_position_is_taken_up_by_any_number_of_ranks(stop: int, size: int) -> None:
    """The old trainer began the epoch again after a resize."""
    whole = _epoch(_ranks(3))
    before = _ranks(3)
    iterators = [iter(rank) for rank in before]
    for _ in range(stop):
        for iterator in iterators:
            next(iterator)
    states = [json.loads(json.dumps(rank.state_dict())) for rank in before]
    assert states[0] == states[1] == states[2]
    after = _ranks(size)
    for rank in after:
        rank.load_state_dict(states[0])
        rank.set_epoch(states[0]["epoch"])  # as programs do at the top of an epoch
        assert len(rank) == len(whole)
    rest = _epoch(after)
    # The same global batches, whatever the number of ranks.
    assert [_flat([step]) for step in rest] == [_flat([step]) for step in whole[stop:]]
    assert _epoch(after) != whole


def test_a_list_of_batches_is_taken_up_where_it_was_left() -> None:
    def make() -> list[torch.Tensor]:
        return [torch.tensor([n]) for n in range(11)]

    before = _ranks(3, make)
    for rank in before:
        iterator = iter(rank)
        next(iterator), next(iterator)
    after = _ranks(2, make)
    for rank in after:
        rank.load_state_dict(before[0].state_dict())
        assert len(rank) == 2 + 3
    seen = [plain(batch) for step in zip(*after, strict=True) for batch in step]
    assert [value for batch in seen for value in batch] == [6, 7, 8, 9, 10]
    middle = _ranks(2, make)
    middle[0].load_state_dict(before[0].state_dict())
    next(iter(middle[0]))
    assert middle[0].state_dict()["offset"] == 8


def test_a_position_in_the_last_batch_leaves_an_empty_rest() -> None:
    loader = shard_loader(_loader())
    states = [loader.state_dict() for _ in loader]
    resumed = shard_loader(_loader())
    resumed.load_state_dict(states[-1])
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert loader.state_dict() == resumed.state_dict()


def test_the_seed_is_the_saved_one() -> None:
    saved = shard_loader(_loader(), seed=5)
    other = shard_loader(_loader(), seed=6)
    other.load_state_dict(saved.state_dict())
    assert _epoch([other]) == _epoch([saved])


@pytest.mark.parametrize("state", [{}, {"version": 9}, {"epoch": 1, "step": 2}])
def test_a_foreign_state_is_refused(state: dict) -> None:
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of a shard_loader"):
        shard_loader(_loader()).load_state_dict(state)


def test_a_loader_without_length_has_none() -> None:
    class Batches:
        def __iter__(self) -> object:
            return iter([torch.ones(1)])

    with pytest.raises(TypeError, match="has no length"):
        len(shard_loader(Batches()))
    assert shard_loader(_loader()).dataset.tensors[0].shape == (37,)


class Split(IterableDataset):
    """Each rank's own part already."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter(range(self.rank, 40, 2))


DIFFERENT = {
    "another split": lambda rank: _loader_of(
        random_split(TensorDataset(torch.arange(40)), [0.8, 0.2], _seeded(rank))[0]
    ),
    "another order": lambda rank: _loader(generator=_seeded(rank)),
    "other files": lambda rank: _loader_of([f"{(number + rank) % 40}.txt" for number in range(40)]),
    "split already": lambda rank: DataLoader(Split(rank), batch_size=4),
}


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def _loader_of(data):
    return DataLoader(data, batch_size=4)


@pytest.mark.parametrize("case", DIFFERENT)
def test_loaders_that_differ_between_ranks_are_refused_on_all(case):
    def body(group):
        with pytest.raises(DataOrderError):
            next(iter(shard_loader(DIFFERENT[case](group.rank), group=group)))
        return [plain(batch[0]) for batch in shard_loader(_loader(), group=group)]

    one, other = run_ranks(2, body)
    assert sorted([n for batch in one for n in batch] + [n for batch in other for n in batch]) == [
        *range(37)
    ]


class ShufflesItsList(Sampler):
    """In place, as many samplers that make buckets do."""

    def __init__(self, size: int = 37) -> None:
        self.order = list(range(size))

    def __iter__(self) -> object:
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class ShufflesByEpoch(ShufflesItsList):
    def set_epoch(self, epoch: int) -> None:
        self.order = list(range(len(self.order)))
        random.Random(epoch).shuffle(self.order)

    def __iter__(self) -> object:
        return iter(self.order)


def _sampled(sampler: Sampler) -> RankLoader:
    return shard_loader(DataLoader(range(37), 3, sampler=sampler))


def _left_in_the_middle(loader: RankLoader, steps: int = 2) -> dict:
    """The state in the second epoch, behind `steps` batches."""
    list(loader)
    for _, _ in zip(range(steps), loader, strict=False):
        pass
    return json.loads(json.dumps(loader.state_dict()))


def test_an_order_that_changes_whenever_it_is_read_is_refused_in_the_middle_of_an_epoch() -> None:
    state = _left_in_the_middle(_sampled(ShufflesItsList()))
    resumed = _sampled(ShufflesItsList())
    resumed.load_state_dict(state)
    with pytest.raises(DataOrderError, match="another order whenever it is read"):
        next(iter(resumed))
    at_the_start = _left_in_the_middle(_sampled(ShufflesItsList()), steps=0)
    resumed.load_state_dict(at_the_start)
    assert sorted(sample for batch in resumed for sample in plain(batch)) == list(range(37))


def test_another_order_than_the_epoch_began_with_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = [plain(batch) for batch in _epochs_of(_sampled(ShufflesByEpoch()), 2)[1]]
    state = _left_in_the_middle(_sampled(ShufflesByEpoch()))
    resumed = _sampled(ShufflesByEpoch())
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [plain(batch) for batch in resumed] == whole[2:]
    assert not caplog.records
    other = shard_loader(DataLoader(range(37), 3, sampler=list(range(36, -1, -1))))
    other.load_state_dict(state)
    assert len(list(other)) == 11
    assert ["in another order" in each.message for each in caplog.records] == [True]


def _epochs_of(loader: RankLoader, count: int) -> list[list[torch.Tensor]]:
    return [list(loader) for _ in range(count)]


def test_ready_batches_of_another_size_are_refused_in_the_middle_of_an_epoch() -> None:
    def make(size: int) -> list[torch.Tensor]:
        return list(torch.arange(36).split(size))

    state = _left_in_the_middle(shard_loader(make(3)))
    same = shard_loader(make(3))
    same.load_state_dict(state)
    assert [plain(batch) for batch in same] == plain(torch.stack(make(3)[2:]))
    other = shard_loader(make(6))
    other.load_state_dict(state)
    with pytest.raises(DataOrderError, match="ready batches of another size"):
        next(iter(other))
