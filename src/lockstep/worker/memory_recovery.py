# SPDX-License-Identifier: Apache-2.0
"""Goes back to a checkpoint in memory or on the disk, and computes the steps since then again.

Those steps have been counted, reported and logged, so here they change nothing but the state. They
come to the same weights: what a step computes follows from the state, the position in the data and
the call's arguments, and random numbers from the position.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.metrics import TimerCollection
from lockstep.operator.buffer_values import put_buffer_values
from lockstep.operator.sync_setup import rejoin
from lockstep.operator.trained_parameters import restore_trained_parameters
from lockstep.sync import note_reduced
from lockstep.worker import state_broadcast
from lockstep.worker.loop_run import LoopRun
from lockstep.worker.memory_checkpoint import merge_parts
from lockstep.worker.remote_method import Communication, OnFailure, remote_method
from lockstep.worker.state_dict import unsaved_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.group import Group
    from lockstep.operator import TrainingOperator
    from lockstep.worker.loop_run import LoopProgress
    from lockstep.worker.memory_checkpoint import (
        MemoryCheckpoint,
        MemoryCheckpoints,
        Part,
        TrainCall,
    )
    from lockstep.worker.snapshot import CheckpointOnDisk
    from lockstep.worker.survivor_state import RunPosition, SurvivorState
    from lockstep.worker.worker import Worker


class PartsInMemory(NamedTuple):
    """A memory checkpoint of which no part is lost.

    Attributes:
        holders: for each part the ranks of the next generation that have it.
    """

    checkpoint: MemoryCheckpoint
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StateRestore:
    """How the next generation of the group gets its state back.

    Attributes:
        step: committed steps of the run in that state.
        furthest: the survivor that has come furthest: steps are computed again up to there.
        last_written: the step of the newest checkpoint that is on the disk; 0 without one.
        parts: where the state is in the ranks' memory; None if it was read from the disk.
        rest: what the checkpoint on the disk does not hold; None if the state is in memory.
        directory: that checkpoint's; None if the state is in memory.
    """

    step: int
    furthest: SurvivorState
    last_written: int
    parts: PartsInMemory | None = None
    rest: Part | None = None
    directory: str | None = None

    @property
    def target(self) -> RunPosition:
        """How far the run had come."""
        assert self.furthest.position is not None, "it has the state of the run"
        return self.furthest.position

    @property
    def steps(self) -> int:
        """The committed steps that are computed again."""
        return self.target.steps - self.step


def find_restore(
    held: Sequence[Sequence[tuple[MemoryCheckpoint, int]]],
    furthest: SurvivorState,
    last_written: int = 0,
) -> StateRestore | None:
    """The restore from the newest complete memory checkpoint; None if of each a part is lost.

    Args:
        held: the parts that each rank of the next generation has.
        furthest: the survivor that has come furthest.
        last_written: see `StateRestore`.
    """
    holders: dict[MemoryCheckpoint, dict[int, tuple[int, ...]]] = {}
    for rank, parts in enumerate(held):
        for checkpoint, part in parts:
            found = holders.setdefault(checkpoint, {})
            found[part] = (*found.get(part, ()), rank)
    assert furthest.position is not None, "it has the state of the run"
    whole = [
        each
        for each, found in holders.items()
        # A later one was taken with gradients on the way that are lost with a worker.
        if len(found) == each.size and each.step <= furthest.position.steps
    ]
    if not whole:
        return None
    newest = max(whole)
    in_order = tuple(holders[newest][part] for part in range(newest.size))
    return StateRestore(newest.step, furthest, last_written, parts=PartsInMemory(newest, in_order))


def find_restores_on_disk(
    on_disk: Sequence[CheckpointOnDisk], furthest: SurvivorState
) -> list[StateRestore]:
    """The restores from checkpoints on the disk, from which training alone has led on.

    Args:
        on_disk: the run's checkpoints, the newest one last.
        furthest: the survivor that has come furthest.

    Returns:
        The newest one first.
    """
    return [
        StateRestore(
            each.step,
            furthest,
            on_disk[-1].step,
            rest=furthest.saved[each.step, each.call],
            directory=each.path,
        )
        for each in reversed(on_disk)
        if (each.step, each.call) in furthest.saved
    ]


def _part_that_was_read(worker: Worker, rest: Part) -> Part:
    state, worker.incoming = worker.incoming, None
    assert state is not None, "`read_rows` comes first"
    return replace(rest, state=dict(state))


def _receive_part(worker: Worker, group: Group, source: PartsInMemory) -> Part:
    """What this rank has of the checkpoint's state in `group`, of whatever size that is.

    Collective:
        Every rank: a broadcast of each part that a rank needs and does not hold itself.
    """
    checkpoint, mesh = source.checkpoint, worker.mesh
    needed = (part for part in _receive_parts(worker, group, source) if part is not None)
    if checkpoint.size == mesh.shard_size:
        (mine,) = needed
        return mine
    own = _memory_of(worker).own_part(checkpoint)
    return merge_parts(needed, (mesh.shard_rank, mesh.shard_size), own)


def _receive_parts(worker: Worker, group: Group, source: PartsInMemory) -> Iterator[Part | None]:
    """The parts in order; None for those that this rank does not need."""
    checkpoint, memory, mesh = source.checkpoint, _memory_of(worker), worker.mesh
    is_same_size = checkpoint.size == mesh.shard_size
    for number, holders in enumerate(source.holders):
        is_mine = mesh.shard_rank == number or not is_same_size
        needed_by = range(number, mesh.size, mesh.shard_size) if is_same_size else range(mesh.size)
        own = memory.part(checkpoint, number) if group.rank in holders else None
        if set(needed_by) <= set(holders):
            pass  # it need not be sent
        elif group.rank == holders[0]:
            state_broadcast.send(group, own)
        elif is_mine and own is None:
            own = state_broadcast.receive(group, holders[0])
        else:
            state_broadcast.decline(group, holders[0])
        yield own if is_mine else None


def go_back(worker: Worker, group: Group, restore: StateRestore) -> None:
    """Load the state of a checkpoint, of which this rank has other rows now.

    Collective:
        Every rank of `group`: exchanges parts in memory, attaches the gradients' synchronisation.
    """
    if restore.parts is not None:
        part = _receive_part(worker, group, restore.parts)
    else:
        assert restore.rest is not None, "it was read from the disk"
        part = _part_that_was_read(worker, restore.rest)
    # Before the ranks compare their models, and so before the weights are loaded.
    restore_trained_parameters(worker.run, part.state)
    put_buffer_values(worker.run, part.buffers, worker.operator.device)
    context = worker.operator._lockstep.context
    rejoin(worker.run, context, restore.step, load=partial(_load, worker, part))
    furthest = restore.furthest
    worker.num_batches_to_recompute = furthest.num_batches_to_recompute
    for purpose, place in furthest.other_places.items():
        worker.cursors[purpose].move_to(*place)
    # Also in a new process: after another loss every rank knows how far the run had come.
    worker.survivor, worker.has_state = furthest, True
    _memory_of(worker).go_back(part, furthest.calls, furthest.saved, restore.target)


def take_again(worker: Worker) -> None:
    """Take the checkpoint again that the ranks have gone back to: they have other partners now.

    Collective:
        Every rank; see `MemoryCheckpoints.take`.
    """
    memory = _memory_of(worker)
    memory.take(memory.taken_in)


def _memory_of(worker: Worker) -> MemoryCheckpoints:
    assert worker.memory is not None, "the driver asks for this under sync='fsdp' alone"
    return worker.memory


def _load(worker: Worker, part: Part) -> None:
    """Load this rank's part; its rows go to the meshes that the models and optimizers have now."""
    run, state = worker.run, worker.operator._lockstep
    log, state.step_log = state.step_log, None  # its steps stay reported
    try:
        worker.load_state(part.state)
    finally:
        state.step_log = log
    with torch.no_grad():
        unsaved = unsaved_parameters(run, part.state)
        for parameter, rows in zip(unsaved, part.parameters, strict=True):
            parameter.copy_(_own_rows(rows, parameter))
    state.weighed_by = dict(part.weighed_by)
    if part.gradients is not None:
        for parameter, gradient in zip(run.parameters(), part.gradients, strict=True):
            parameter.grad = None if gradient is None else _own_rows(gradient, parameter)
        if not part.is_unreduced:
            # No round of this group has left them, but all ranks have the same gradients.
            note_reduced(run.parameters())


def _own_rows(rows: Any, parameter: Any) -> torch.Tensor:
    """What a part holds of a parameter or its gradient, as this rank holds the parameter."""
    if isinstance(rows, torch.Tensor):
        return rows.to(parameter.device)
    from lockstep.sync.parameter_shards import shard_like

    return shard_like(rows, parameter)


class _ReplayedRun(LoopRun):
    """A call of which some steps are made again; the last epoch has maybe not ended yet."""

    last_epoch: int

    def _end_epoch(self) -> None:
        if self.cursor.epoch < self.last_epoch:
            super()._end_epoch()


@remote_method(Communication.RUN_GROUP, OnFailure.RAISE)
def renew_memory_checkpoint(worker: Worker) -> None:
    """Between calls: take a checkpoint, because the state has changed by something but training.

    Collective:
        Every rank; see `MemoryCheckpoints.take`.
    """
    worker.survivor = None  # it tells of the state from before
    _memory_of(worker).renew()


@remote_method(Communication.RUN_GROUP, OnFailure.RAISE, is_timed=True)
def replay(worker: Worker, restore: StateRestore) -> None:
    """Train from the checkpoint, whose state is loaded, to where the run was.

    Collective:
        Every rank, as in training.
    """
    memory, before, target = _memory_of(worker), worker.loop_run, restore.target
    calls, (first, progress) = memory.calls_to_repeat(), memory.taken_in
    # The undo of a window that was open may have led back to before the last call.
    ends = [*(min(call.step, target.steps) for call in calls[1:]), target.steps]
    worker.rollback.begin_call(worker.cursors["train"])
    with _counts_set_aside(worker.operator):
        try:
            for call, end in zip(calls, ends, strict=False):
                begun = progress if call.number == first else None
                _replay_call(worker, call, begun, end, target.epoch)
        finally:
            worker.loop_run = before
    # A new process counts from here, as the others do.
    worker.snapshots.forget(restore.last_written)
    worker.attach_audit(worker.operator._lockstep.committed)


def _replay_call(
    worker: Worker, call: TrainCall, progress: LoopProgress | None, end: int, epoch: int
) -> None:
    """Make the steps of one call again, until the run has committed `end`."""
    cursor, committed = worker.cursors["train"], worker.operator._lockstep.committed
    run = _ReplayedRun(
        worker.operator,
        cursor,
        replace(call.request, profile=False, interrupted_at=progress),
        arithmetic=worker.arithmetic,
        on_commit=None,
        rollback=worker.rollback,
        num_batches_to_recompute=call.num_batches_to_recompute,
    )
    run.limit, run.last_epoch = call.steps_at(end), epoch
    # Below zero where the checkpoint lies in a window that was open when the call began.
    run.committed.steps = call.steps_at(committed)
    worker.loop_run = run  # what the watchdog reads
    if committed < end:
        run.run()
    # The run may have had no step to make, or have come to the end of an epoch.
    cursor.agree(worker.operator._lockstep.context.group)
    if cursor.ends_before(cursor.step):
        run._end_epoch()


@contextmanager
def _counts_set_aside(operator: TrainingOperator) -> Iterator[None]:
    """Inside, metrics, rows and times count for nothing."""
    state, timers = operator._lockstep, operator.timers
    kept = state.meters, state.pass_sums, state.latest, state.step_log, state.registered_metrics
    state.step_log = None
    state.registered_metrics = type(state.registered_metrics)()
    operator.timers = TimerCollection()
    try:
        with state.without_counting():
            yield
    finally:
        state.meters, state.pass_sums, state.latest, state.step_log, state.registered_metrics = kept
        operator.timers = timers
