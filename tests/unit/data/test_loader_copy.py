# SPDX-License-Identifier: Apache-2.0
"""Iterators that end early, stay alive or follow one another leave no worker process behind."""

import gc
import multiprocessing
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.errors import ConfigurationError
from sharing import plain

PLACEMENT = ShardAssignment(2, range(2), 0)


_BEFORE: set[Any] = set()
"""Processes that other tests share."""


def _started() -> set[Any]:
    return set(multiprocessing.active_children()) - _BEFORE


@pytest.fixture(autouse=True)
def _no_process_stays_behind() -> object:
    _BEFORE.clear()
    _BEFORE.update(multiprocessing.active_children())
    yield
    gc.collect()
    assert not _started()


def _sharded(**kwargs: object) -> ShardedLoader:
    loader = DataLoader(range(40), batch_size=2, num_workers=1, shuffle=True, **kwargs)
    return ShardedLoader(loader, PLACEMENT, parts=BatchParts.JOINT_OR_BORROWED)


def _rows(steps: object) -> list[list[int]]:
    return [plain(step.parts[0].batch) for step in steps]


def test_an_iteration_left_early_ends_its_workers() -> None:
    steps = _sharded().batches(0)
    next(steps)
    assert len(_started()) == 1
    steps.close()
    assert not _started()


def test_a_finished_iteration_ends_its_workers() -> None:
    steps = _sharded().batches(0)
    assert len(_rows(steps)) == 10
    assert not _started()


def test_a_broken_dataset_ends_its_workers_and_says_what_broke() -> None:
    class Broken(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise ValueError("sample 5 is broken")
            return index

    for num_workers in (0, 1):
        loader = DataLoader(Broken(), batch_size=2, num_workers=num_workers)
        sharded = ShardedLoader(loader, PLACEMENT, parts=BatchParts.JOINT_OR_BORROWED)
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="sample 5 is broken"):
            list(sharded.batches(0))
        assert torch.equal(torch.get_rng_state(), state)
        assert not _started()


def test_iterations_may_overlap() -> None:
    sharded = _sharded()
    expected = _rows(sharded.batches(0)), _rows(sharded.batches(1))
    first, second = sharded.batches(0), sharded.batches(1)
    together = [_rows([one, other]) for one, other in zip(first, second, strict=True)]
    assert [pair[0] for pair in together] == expected[0]
    assert [pair[1] for pair in together] == expected[1]


def test_persistent_workers_serve_epoch_after_epoch() -> None:
    sharded = _sharded(persistent_workers=True)
    fresh = _sharded()
    expected = [_rows(fresh.batches(epoch)) for epoch in range(3)]
    assert _rows(sharded.batches(0)) == expected[0]
    (worker,) = _started()
    left_early = sharded.batches(1)
    next(left_early)
    assert _rows(sharded.batches(1)) == expected[1]
    assert _rows(sharded.batches(2)) == expected[2]
    assert _started() == {worker}
    with pytest.raises(ConfigurationError, match="persistent_workers=False"):
        next(left_early)
    sharded.close()
    assert not _started()
    assert _rows(sharded.batches(0)) == expected[0]
    sharded.close()


def test_the_users_own_iteration_goes_on_beside_ours() -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    own = iter(loader)
    first = plain(next(own))
    sharded = ShardedLoader(loader, PLACEMENT, parts=BatchParts.JOINT_OR_BORROWED)
    assert _rows(sharded.batches(0)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    sharded.close()
    assert [first, *map(plain, own)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    own._shutdown_workers()


def test_a_loader_that_is_forgotten_takes_its_workers_along() -> None:
    sharded = _sharded(persistent_workers=True)
    next(sharded.batches(0))
    del sharded  # no cycle keeps it: its processes end here, not at some collection
    assert not _started()


def test_a_worker_that_never_has_samples_starts_no_processes() -> None:
    loader = DataLoader(range(4), batch_sampler=[[0, 1, 2, 3]], num_workers=1)
    sharded = ShardedLoader(loader, ShardAssignment(2, range(1, 2), 0), parts=BatchParts.BY_SHARD)
    (step,) = sharded.batches(0)
    assert step.parts == []
    assert not _started()


def test_persistent_workers_that_were_killed_are_started_anew() -> None:
    """As by Ctrl-C in a terminal, which reaches every process there."""
    sharded = _sharded(persistent_workers=True)
    before = _rows(sharded.batches(0))
    # Torch's own handler would raise here if it finds a killed worker before `join` has.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for process in _started():
            process.kill()
            process.join()
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert len(_rows(sharded.batches(0))) == len(before)
    assert _rows(sharded.batches(0)) == before
    sharded.close()
