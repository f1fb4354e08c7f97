# SPDX-License-Identifier: Apache-2.0
"""add_dist_sampler=False: each worker reads its own loader, and may repeat its last batch."""

from pathlib import Path

import pytest
import torch
from tests.unit.trainer.programs import (
    BATCH,
    STEPS_PER_EPOCH,
    Regression,
    Streaming,
    by_hand,
    problem,
    same,
    trainer,
    weights,
)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from lockstep.data import ShardAssignment, UserShardedLoader
from lockstep.errors import ConfigurationError, NotShardableError, WrongTypeError
from lockstep.keys import BATCH_SIZE
from sharing import plain

SECOND = ShardAssignment(2, range(1, 2), 0)


def _steps(loader: object, *args: int, **kwargs: int) -> list[tuple[int, list, int]]:
    steps = UserShardedLoader(loader, SECOND).batches(*args, **kwargs)
    return [(s.index, plain(s.parts[0].batch), s.parts[0].num_samples) for s in steps]


def test_the_loader_delivers_as_it_is() -> None:
    loader = DataLoader(range(5), batch_size=2)
    expected = [(0, [0, 1], 2), (1, [2, 3], 2), (2, [4], 1)]
    assert _steps(loader, 0) == expected
    assert _steps(loader, 0, 1) == expected[1:]
    unsharded = UserShardedLoader(loader, SECOND)
    assert unsharded.steps_per_epoch == 3
    (part,) = next(iter(unsharded.batches(0))).parts
    assert part.shards == (1,)


def test_no_batch_is_cut_off_where_the_workers_agreed_on_fewer() -> None:
    """They agree by what `__len__` says; the cursor refuses what comes after that."""
    loader = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4])]
    assert [index for index, _, _ in _steps(loader, 0, num_steps=2)] == [0, 1, 2]


def test_a_worker_that_has_run_out_borrows_its_last_batch() -> None:
    loader = [torch.tensor([1, 2]), torch.tensor([3])]
    assert _steps(loader, 0, num_steps=4) == [
        (0, [1, 2], 2),
        (1, [3], 1),
        (2, [3], 0),
        (3, [3], 0),
    ]
    assert _steps(loader, 0, 3, num_steps=4) == [(3, [3], 0)]
    assert [s.parts for s in UserShardedLoader([], SECOND).batches(0, num_steps=2)] == [[], []]


def test_a_worker_that_is_not_to_borrow_has_steps_without_parts() -> None:
    unsharded = UserShardedLoader([torch.tensor([1, 2]), torch.tensor([3])], SECOND, borrows=False)
    batches = [[plain(part.batch) for part in s.parts] for s in unsharded.batches(0, num_steps=4)]
    assert batches == [[[1, 2]], [[3]], [], []]


def test_the_users_distributed_sampler_is_told_the_epoch() -> None:
    loader = DataLoader(range(8), batch_size=2, sampler=DistributedSampler(range(8), 2, 1))
    first, second = _steps(loader, 0), _steps(loader, 1)
    assert first != second
    assert _steps(loader, 0) == first


def test_the_order_is_a_function_of_epoch_and_worker_and_disturbs_nobody() -> None:
    generator = torch.Generator().manual_seed(7)
    for loader in (
        DataLoader(range(30), batch_size=3, shuffle=True),
        DataLoader(range(30), batch_size=3, shuffle=True, generator=generator),
    ):
        torch.manual_seed(1)
        state, own = torch.get_rng_state(), generator.get_state()
        whole = _steps(loader, 1)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(generator.get_state(), own)
        torch.manual_seed(2)
        assert _steps(loader, 1, 4) == whole[4:]
        assert _steps(loader, 2) != whole
    shuffled = DataLoader(range(30), batch_size=3, shuffle=True)
    first = [plain(s.parts[0].batch) for s in UserShardedLoader(shuffled, SECOND).batches(0)]
    other = UserShardedLoader(shuffled, ShardAssignment(2, range(1), 0)).batches(0)
    assert [plain(s.parts[0].batch) for s in other] != first


def test_what_cannot_start_again_is_refused() -> None:
    with pytest.raises(NotShardableError, match="read only once"):
        UserShardedLoader(iter([1]), SECOND)
    with pytest.raises(WrongTypeError, match="not a loader"):
        UserShardedLoader(3, SECOND)


LENGTHS = [4, 7, 2, 5, 3]


def _time_first(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_sequence([torch.ones(length, 2) for length in lengths]), torch.tensor(lengths)


class _ReadsLists(Dataset):
    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return _time_first([LENGTHS[index] for index in indices])


class _Stream(IterableDataset):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __iter__(self) -> object:
        return iter(LENGTHS)


def _counts(loader: object) -> list[int]:
    steps = UserShardedLoader(loader, SECOND).batches(0)
    return [part.num_samples for step in steps for part in step.parts]


def test_batches_with_time_steps_first_have_as_many_samples_as_the_loader_asked_for() -> None:
    lists = BatchSampler(range(5), 2, drop_last=False)
    assert _counts(DataLoader(LENGTHS, 2, collate_fn=_time_first)) == [2, 2, 1]
    assert _counts(DataLoader(LENGTHS, batch_sampler=lists, collate_fn=_time_first)) == [2, 2, 1]
    assert _counts(DataLoader(_ReadsLists(), batch_size=None, sampler=lists)) == [2, 2, 1]
    assert _counts(DataLoader(_Stream(), 2, collate_fn=_time_first)) == [2, 2, 1]
    loader = DataLoader(LENGTHS, 2, collate_fn=_time_first)
    assert [step[2] for step in _steps(loader, 0, 2)] == [1]


def test_rows_are_the_samples_where_nothing_else_is_certain() -> None:
    def points_of_time(items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(items), 4, 2), torch.ones(4)

    def unpacked(items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        (rows,) = items
        return torch.ones(rows, 1, 8, 8), torch.ones(1)

    def crops(items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3 * len(items), 3, 8, 8), torch.ones(len(items))

    assert _counts(DataLoader(range(6), 4, collate_fn=points_of_time)) == [4, 2]
    assert _counts(DataLoader(LENGTHS, 1, collate_fn=unpacked)) == LENGTHS
    assert _counts(DataLoader(range(3), 2, collate_fn=crops)) == [6, 3]
    assert _counts([_time_first(LENGTHS)]) == [7]  # nobody says how many it was made of


def test_one_worker_has_nobody_to_agree_with() -> None:
    """Its loader need not have a length."""
    with trainer(Streaming, add_dist_sampler=False) as one:
        assert one.train()["batch_count"] == 4
        one.train(num_steps=6)
        assert same(weights(one.get_model()), by_hand(10))


class OfGlobalBatches(Regression):
    """One process reads the whole data, in batches of the size that it is told."""

    def data(self):
        return DataLoader(TensorDataset(*problem()), self.config[BATCH_SIZE])


def test_the_loader_of_several_replicas_has_whole_global_batches() -> None:
    arguments = {"add_dist_sampler": False, "sync": "data_parallel", "num_workers": 2}
    with trainer(OfGlobalBatches, config={BATCH_SIZE: BATCH}, **arguments) as one:
        assert one.train()["batch_count"] == STEPS_PER_EPOCH
        assert same(weights(one.get_model()), by_hand(STEPS_PER_EPOCH))


def test_a_worker_does_not_go_on_with_the_parts_of_several(tmp_path: Path) -> None:
    """It would read one batch a step where two were read, and skip another half of the samples."""
    config = {BATCH_SIZE: BATCH}
    arguments = {"config": config, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with trainer(OfGlobalBatches, num_shards=2, **arguments) as two:
        two.train(num_steps=2)
        state = two.state_dict()
    with pytest.raises(ConfigurationError, match="as many workers as shards"):
        trainer(OfGlobalBatches, resume="auto", add_dist_sampler=False, **arguments)
    with trainer(OfGlobalBatches, config=config, add_dist_sampler=False) as one:
        before = weights(one.get_model())
        with pytest.raises(ConfigurationError, match="as many workers as shards"):
            one.load_state_dict(state)
        assert same(weights(one.get_model()), before)
