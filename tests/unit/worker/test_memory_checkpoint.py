# SPDX-License-Identifier: Apache-2.0
"""Which parts go to whom, how parts of other ranks are made of them, what is computed again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lockstep.local_rows import LocalRows, first_row, rows_of
from lockstep.worker.loop_run import LoopProgress, LoopRequest
from lockstep.worker.memory_checkpoint import (
    MemoryCheckpoint,
    MemoryCheckpoints,
    Part,
    _partners,
    merge_parts,
)
from lockstep.worker.memory_recovery import find_restore, find_restores_on_disk
from lockstep.worker.snapshot import CheckpointOnDisk
from lockstep.worker.survivor_state import RunPosition, SurvivorState

TENSORS = {
    "even": torch.arange(24.0).view(12, 2),
    "uneven": torch.arange(7.0),
    "few": torch.arange(2.0),
}


def part_of(rank, size):
    rows = {
        name: LocalRows(
            rows_of(whole, rank, size).clone(), whole.shape, first_row(len(whole), rank, size)
        )
        for name, whole in TENSORS.items()
    }
    state = {"models": [rows], "operator": {"of": rank, "own": rows["even"]}, "global_step": 7}
    return Part(state, [], [rows["uneven"]], None, {}, 0, None)


@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.parametrize("after", range(1, 6))
def test_rows_of_any_number_of_ranks_from_those_of_any_other(before, after):
    held = [part_of(old, before) for old in range(before)]
    for rank in range(after):
        own = held[rank] if rank < before else None
        merged = merge_parts(iter(held), (rank, after), own)
        for name, whole in TENSORS.items():
            got = merged.state["models"][0][name]
            assert torch.equal(got.rows, rows_of(whole, rank, after))
            assert got.shape == whole.shape
        (unsaved,) = merged.parameters
        assert torch.equal(unsaved.rows, rows_of(TENSORS["uneven"], rank, after))
        assert merged.state["global_step"] == 7
        # Each process keeps what is its own; a new one begins with rank 0's.
        assert merged.state["operator"]["of"] == (rank if rank < before else 0)
    # Another death may need them once more.
    for old, part in enumerate(held):
        for name, whole in TENSORS.items():
            assert torch.equal(part.state["models"][0][name].rows, rows_of(whole, old, before))


@pytest.mark.parametrize(
    ("local_ranks", "on_another_host"),
    [([0, 1], 0), ([0, 1, 0, 1], 4), ([0, 1, 2, 0], 2), ([0, 0, 0], 3), ([0, 1, 2, 3], 0)],
)
def test_a_copy_goes_to_another_host_where_there_is_one(local_ranks, on_another_host):
    hosts, host = [], -1
    for local in local_ranks:
        host += local == 0
        hosts.append(host)
    pairs = [_partners(local_ranks, rank) for rank in range(len(local_ranks))]
    # Each rank's copy is with one other, who knows it.
    assert sorted(to for to, _ in pairs) == list(range(len(local_ranks)))
    assert all(pairs[to][1] == rank for rank, (to, _) in enumerate(pairs))
    assert sum(hosts[to] != hosts[rank] for rank, (to, _) in enumerate(pairs)) == on_another_host


FURTHEST = SurvivorState(RunPosition(9, 0))
OLD, NEW = MemoryCheckpoint(False, 1, 4, 3), MemoryCheckpoint(False, 2, 8, 3)


def test_the_newest_checkpoint_of_which_all_parts_are_left():
    held = [[(OLD, 0), (OLD, 2), (NEW, 0)], [(OLD, 1), (OLD, 0), (NEW, 1), (NEW, 0)], []]
    restore = find_restore(held, FURTHEST)
    assert restore is not None
    assert (restore.parts.checkpoint, restore.steps) == (OLD, 5)
    # Rank 0 has its own part, and that of the rank that is gone.
    assert restore.parts.holders == ((0, 1), (1,), (0,))
    complete = [[*held[0], (NEW, 2)], *held[1:]]
    restore = find_restore(complete, FURTHEST)
    assert restore is not None
    assert (restore.parts.checkpoint, restore.steps) == (NEW, 1)


def test_what_survivors_of_several_copies_hold_is_a_checkpoint_if_all_rows_are_left():
    now, before = (MemoryCheckpoint(True, 0, step, 2) for step in (9, 8))
    # Ranks 0 and 2 have the same rows; rank 2 had not committed the last step yet.
    all_left = [[(now, 0), (OLD, 0)], [(now, 1), (OLD, 1)], [(before, 0), (OLD, 0)]]
    restore = find_restore(all_left, FURTHEST)
    assert restore is not None
    assert (restore.parts, restore.steps) == ((now, ((0,), (1,))), 0)
    # Nobody has the first rows at the last step, and nobody the second at the one before.
    one_lost = [[(before, 0), (MemoryCheckpoint(False, 3, 6, 2), 0)], [(now, 1)], all_left[2]]
    one_lost[1].append((MemoryCheckpoint(False, 3, 6, 2), 1))
    restore = find_restore(one_lost, FURTHEST)
    assert restore is not None
    assert (restore.step, restore.steps) == (6, 3)


LOST = [[(OLD, 0), (OLD, 2)], [(NEW, 1), (NEW, 2)]]


def test_none_where_a_part_of_each_is_lost():
    assert find_restore(LOST, FURTHEST) is None


def test_a_checkpoint_on_the_disk_is_known_by_its_step_and_its_call():
    ours, earlier = part_of(0, 1), part_of(0, 2)
    survivor = replace(FURTHEST, saved={(5, 3): ours, (4, 2): earlier})
    on_disk = [
        CheckpointOnDisk(4, 2, "step-4"),
        CheckpointOnDisk(5, 3, "step-5"),
        # Of a way that the run has left by `load`: it came to these steps in another call.
        CheckpointOnDisk(5, 1, "left"),
    ]
    first, second = find_restores_on_disk(on_disk, survivor)
    assert (first.directory, first.rest, first.steps) == ("step-5", ours, 4)
    assert (second.directory, second.rest, second.steps) == ("step-4", earlier, 5)
    assert find_restores_on_disk(on_disk, FURTHEST) == []


def test_none_that_is_further_than_the_run_can_go_back_to():
    held = [[(NEW, 0), (NEW, 1), (NEW, 2)]]
    assert find_restore(held, FURTHEST) is not None
    assert find_restore(held, SurvivorState(RunPosition(7, 0))) is None


REQUEST = LoopRequest("train", None, False, {})


def memory_with(steps, every="auto"):
    """After calls that began at these steps."""
    state = SimpleNamespace(committed=0)
    operator = SimpleNamespace(_lockstep=state)
    spec = SimpleNamespace(memory_checkpoint_every=every)
    worker = SimpleNamespace(spec=spec, operator=operator, num_batches_to_recompute=0)
    memory = MemoryCheckpoints(worker)
    for state.committed in steps:
        memory.begin_call(REQUEST)
    return memory


def test_the_call_in_which_it_was_taken_goes_on_and_later_ones_begin():
    """Also where the next call began at the very step at which this one ended."""
    calls = memory_with([0, 5, 5, 9]).calls
    progress = LoopProgress(0, 0, 5, 0, False)
    spare = memory_with([])
    spare.go_back(replace(part_of(0, 1), call=0, progress=progress), calls, {}, (9, 0))
    assert [call.step for call in spare.calls_to_repeat()] == [0, 5, 5, 9]
    assert spare.taken_in == (0, progress)
    spare.go_back(replace(part_of(0, 1), call=2, progress=None), calls, {}, (9, 0))
    assert [call.number for call in spare.calls_to_repeat()] == [2, 3]
    assert spare.calls_to_repeat()[0].steps_at(9) == 4
    spare.begin_call(REQUEST)
    assert spare.calls[-1].number == 4


@pytest.mark.parametrize(
    ("cost_s", "step_s", "interval"), [(0.5, 0.1, 500), (0.001, 1.0, 1), (0.02, 0.5, 4)]
)
def test_the_interval_lets_copies_take_one_percent_of_the_time(cost_s, step_s, interval):
    memory = memory_with([])
    memory._measure(cost_s, step_s)
    assert memory._interval == interval
    fixed = memory_with([], every=3)
    fixed._measure(cost_s, step_s)
    assert fixed._interval == 3
