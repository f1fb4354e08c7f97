# SPDX-License-Identifier: Apache-2.0
"""Augmentations are functions of (seed, epoch, step, shard), whichever process reads."""

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.data.global_batches import ItemKind
from lockstep.data.seeded_dataset import (
    Request,
    SeededDataset,
    Segment,
    WorkerInitFn,
    may_draw,
)
from lockstep.randomness import RandomState
from sharing import by_shard, plain, share_out


class Noisy(Dataset):
    """Every sample is its index and a draw from each global generator."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


def noisy_collate(rows: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws too, as mixup does."""
    return torch.stack(rows) + torch.rand((), dtype=torch.float64) / 1000


def make(num_workers: int = 0, **kwargs: object) -> DataLoader:
    return DataLoader(
        Noisy(),
        batch_size=3,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=noisy_collate,
        **kwargs,
    )


def test_zero_one_and_two_loader_workers_draw_the_same() -> None:
    alone = by_shard(share_out(make, 2, 1))
    assert by_shard(share_out(lambda: make(1), 2, 1)) == alone
    assert by_shard(share_out(lambda: make(2), 2, 1)) == alone
    assert len({row[1] for batch in alone.values() for row in batch}) == 26


def test_the_number_of_training_workers_does_not_show() -> None:
    alone = by_shard(share_out(make, 4, 1))
    for num_workers in (2, 3, 4):
        assert by_shard(share_out(make, 4, num_workers)) == alone


def test_a_resumed_run_draws_the_same() -> None:
    whole = by_shard(share_out(make, 2, 1, epoch=1))
    rest = by_shard(share_out(lambda: make(2), 2, 1, epoch=1, start_step=2))
    assert rest == {key: value for key, value in whole.items() if key[0] >= 2}


def test_joint_batches_hold_the_same_samples() -> None:
    def plain_collate() -> DataLoader:
        return DataLoader(Noisy(), batch_size=3, shuffle=True)

    apart = by_shard(share_out(plain_collate, 2, 1))
    (joined,) = share_out(plain_collate, 2, 1, joint=True)
    for step in joined:
        rows = [row for shard in (0, 1) for row in apart.get((step.index, shard), [])]
        assert plain(step.parts[0].batch) == rows


def test_epoch_seed_step_and_shard_all_count() -> None:
    class Same(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(0)

    def loader() -> DataLoader:
        return DataLoader(Same(), batch_size=1)

    runs = [share_out(loader, 2, 1, epoch=e, seed=s) for e, s in ((0, 0), (1, 0), (0, 1))]
    draws = [tuple(batch[0]) for run in runs for batch in by_shard(run).values()]
    assert len(draws) == len(set(draws)) == 3 * 26


def _rows() -> DataLoader:
    """What cannot draw is read without putting anything back, and so without seeding."""
    return DataLoader(TensorDataset(torch.arange(26)), batch_size=4)


@pytest.mark.parametrize("loader", [make(0), make(1), _rows()], ids=["here", "worker", "rows"])
def test_the_training_loops_generators_are_left_alone(loader: DataLoader) -> None:
    sharded = ShardedLoader(loader, ShardAssignment(2, range(2), 0), parts=BatchParts.BY_SHARD)
    before = RandomState.capture()
    for _ in sharded.batches(0):
        after = RandomState.capture()
        assert torch.equal(before.cpu, after.cpu)
        assert before.python == after.python
        assert np.array_equal(before.numpy[1], after.numpy[1])
        assert before.numpy[2:] == after.numpy[2:]


def test_only_datasets_that_cannot_draw_are_read_without_seeding() -> None:
    tensors = TensorDataset(torch.arange(4))
    assert not may_draw(tensors)
    assert not may_draw(torch.utils.data.Subset(tensors, [1]))
    assert may_draw(Noisy())
    assert may_draw(torch.utils.data.Subset(Noisy(), [1]))
    assert may_draw([1, 2])


def test_what_a_spawned_loader_worker_is_sent_can_travel() -> None:
    dataset = SeededDataset(Noisy(), ItemKind.SAMPLE_INDEX, noisy_collate, 3)
    twin, start = pickle.loads(pickle.dumps((dataset, WorkerInitFn(_open_in_worker))))
    request = Request(0, 1, (Segment(0, [4, 5]), Segment(1, [6])))
    assert plain(twin.__getitems__(request)) == plain(dataset.__getitems__(request))
    assert len(twin) == len(dataset) == 26
    start(0)  # outside a loader worker there is no worker info; the function must still run


class _Opened(Dataset):
    """Opens its file in the loader worker, through the documented worker info."""

    handle = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(index + self.handle)


def _open_in_worker(worker_id: int) -> None:
    info = get_worker_info()
    if info is not None:
        info.dataset.handle = 100


def test_worker_init_fn_meets_the_users_own_dataset() -> None:
    loader = DataLoader(_Opened(), batch_size=4, num_workers=1, worker_init_fn=_open_in_worker)
    assert by_shard(share_out(lambda: loader, 1, 1)) == {
        (0, 0): [100.0, 101.0, 102.0, 103.0],
        (1, 0): [104.0, 105.0, 106.0, 107.0],
    }
