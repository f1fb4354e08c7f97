# SPDX-License-Identifier: Apache-2.0
"""Leaving a process group that has broken, and joining the next one in the same process.

`leave_broken_group` undoes the step that is not committed. `join` enters the next group, where the
ranks that are behind load the state of the one that is furthest. The driver calls both
(`recovery.regrouping`), once it knows which workers are lost.

A rank commits a step only after all communication of the step, so that its weights then hold every
rank's contribution; and no rank can finish the communication of the next step before all ranks have
entered it. So the surviving ranks are at most one step apart: those behind load the state of the
furthest, and the step that no rank has committed is computed again. Of ranks at the same step one
that has made the writes behind it is further (`operator.writes_behind_steps`). Under
``sync="fsdp"``, where no rank has the whole state, all ranks go back to a memory checkpoint instead
(`memory_recovery`).

The state that travels is that of a checkpoint (see `state_dict`), and what a checkpoint leaves to
`setup`: buffers (see `buffer_values`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.group import Group
from lockstep.operator import TrainingOperator
from lockstep.operator.buffer_values import (
    buffer_values,
    put_buffer_values,
    with_own_local_buffers,
)
from lockstep.operator.sync_setup import rejoin
from lockstep.sync import note_reduced
from lockstep.worker import state_broadcast
from lockstep.worker.loader_sharding import make_sharded_loader
from lockstep.worker.loop_run import LoopProgress, LoopRequest, LoopRun
from lockstep.worker.memory_recovery import go_back, take_again
from lockstep.worker.open_step import Undone
from lockstep.worker.position_queries import run_position
from lockstep.worker.remote_method import Communication, OnFailure, remote_method
from lockstep.worker.state_dict import copy_to_cpu
from lockstep.worker.survivor_state import RunPosition, SurvivorState

if TYPE_CHECKING:
    from lockstep.worker.memory_recovery import StateRestore
    from lockstep.worker.process_group import Rendezvous
    from lockstep.worker.worker import Worker

_log = logging.getLogger("lockstep.recovery")


@dataclass(frozen=True)
class Formation:
    """The next generation of the group.

    Attributes:
        numbers: the number of each rank's worker (see `Worker`).
        source: the rank whose state the others load.
        stale: ranks that load the state of `source`.
        local_ranks: each rank's index among the ranks of its host.
        last_received: the step of the latest snapshot that has come to the driver: later ones may
            be lost with rank 0.
        restore: how ranks whose state is in shards get it back; None for replicas.
    """

    rendezvous: Rendezvous
    numbers: tuple[int, ...]
    source: int
    stale: tuple[int, ...]
    local_ranks: tuple[int, ...]
    last_received: int = 0
    restore: StateRestore | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.numbers)


@remote_method(Communication.NONE, OnFailure.RAISE, is_timed=True)
def leave_broken_group(
    worker: Worker,
    interrupted: LoopRequest | None,
    *,
    is_abandoned: bool = False,
) -> SurvivorState:
    """Leave the group and undo the step that was not committed. Idempotent.

    Args:
        interrupted: the loop that not all workers have completed; None if another call was
            interrupted.
        is_abandoned: the call does not go on: it has ended with the last committed step.
    """
    memory, purpose = worker.memory, None if interrupted is None else interrupted.purpose
    call = worker.loop_run if interrupted is not None else None
    if call is not None and interrupted is not None and call.request.number != interrupted.number:
        call = None  # of an earlier call: this rank has not begun the one that was interrupted
    if memory is not None:
        worker.snapshots.forget_parts()
    if memory is not None and worker.survivor is not None:
        # Another loss, before the steps since the checkpoint were computed again.
        worker.leave()
        survivor = replace(worker.survivor, held=memory.held)
        return _abandoned(worker, survivor, purpose) if is_abandoned else survivor
    recomputed_before = worker.num_batches_to_recompute
    survivor = _leave_broken_group(worker, purpose, call)
    is_at_window_start = worker.num_batches_to_recompute > recomputed_before
    if memory is not None and survivor.position is not None and worker.mesh.replicate_size > 1:
        _take_without_peers(worker, survivor, purpose)
    if survivor.position is not None:
        state = worker.operator._lockstep
        written_behind = state.writes_behind_steps.written(state.committed)
        survivor = replace(survivor, written_behind=written_behind)
    if is_abandoned and survivor.position is not None:
        survivor = _abandoned(worker, survivor, purpose)
    if memory is None or survivor.position is None:
        return survivor
    if purpose != "train" and not is_at_window_start:
        # A state that is being loaded is not one that training has come to.
        survivor = replace(survivor, position=RunPosition(*memory.reached))
    worker.survivor = replace(
        survivor,
        num_batches_to_recompute=worker.num_batches_to_recompute,
        other_places={
            purpose: (cursor.epoch, cursor.step)
            for purpose, cursor in worker.cursors.items()
            if purpose != "train"
        },
        held=memory.held,
        calls=tuple(memory.calls),
        saved=dict(memory.saved),
    )
    return worker.survivor


def _take_without_peers(worker: Worker, survivor: SurvivorState, purpose: str | None) -> None:
    """Make a part of a checkpoint of what this rank has, if that is the state of a committed step.

    Where that is not certain, or copying fails, the ranks go back to the newest memory checkpoint.
    """
    operator, memory, call = worker.operator, worker.memory, worker.loop_run
    loops = (TrainingOperator.validate, TrainingOperator.validate_batch)
    has_own = any(map(operator._lockstep_overrides, loops))
    is_known = purpose == "train" or (purpose == "validation" and not has_own)
    # A user's `state_dict` may communicate, and the group is left.
    is_plain = not operator._lockstep_overrides(TrainingOperator.state_dict)
    if memory is None or not (is_known and is_plain and worker.rollback.is_at_committed_step):
        return
    is_within_call = purpose == "train" and call is not None and not call.is_over
    try:
        memory.take_without_peers(survivor.progress, is_within_call=is_within_call)
    except Exception:
        _log.warning(
            "rank %d could not copy its part of the last step: the run goes back to the newest"
            " memory checkpoint, unless another rank has the same rows",
            worker.rank,
            exc_info=True,
        )


def _abandoned(worker: Worker, survivor: SurvivorState, purpose: str | None) -> SurvivorState:
    """The state of a survivor whose call does not go on."""
    worker.loop_run = worker.before_call = None
    if survivor.progress is not None and purpose == "train":
        # The first batches of the open window belong to an earlier call, which counted them.
        worker.num_batches_to_recompute = max(
            worker.num_batches_to_recompute, -survivor.progress.steps
        )
    return replace(survivor, progress=None)


def undo_without_peers(worker: Worker, interrupted: LoopRequest | None) -> SurvivorState:
    """Without peers, undo the step that was not committed, and be ready for the next call.

    Args:
        interrupted: as for `leave_broken_group`.

    Returns:
        How far the worker has come; `position` is None if an optimizer's change cannot be undone.
    """
    survivor = leave_broken_group(worker, interrupted, is_abandoned=True)
    if survivor.position is None:
        return survivor
    state = worker.operator._lockstep
    state.context = replace(state.context, group=Group(None))
    rejoin(worker.run, state.context, state.committed)
    worker.expect_usual_weight()
    worker.attach_audit(state.committed)
    return survivor


def _leave_broken_group(worker: Worker, purpose: str | None, call: LoopRun | None) -> SurvivorState:
    cursor = worker.cursors.get("train")
    is_unreduced = cursor is not None and worker.rollback.holds_unreduced_gradients(cursor)
    worker.leave()
    if not worker.has_state:
        return SurvivorState(None)
    if worker.memory is not None and worker.reads_dataset:
        return SurvivorState(None)  # Ray gives each row once: no step can be computed again
    # A dataset of Ray's was split for the ranks of the group that is left.
    worker.feed(None, None)
    undone = None
    if call is not None and purpose == "validation":
        # First: it goes back to the models with which it began, behind the window's batches.
        undone = worker.undo(call)
    if is_unreduced:
        # No other rank has these gradients, and those of a lost worker are lost: all ranks begin
        # the window anew.
        if call is not None and purpose == "train":
            call.is_over = False
        elif not worker.return_to_window():
            worker.has_state = False
            return SurvivorState(None)
    # A rank that has trained to the end of the call is ahead. A validation is done again by all
    # ranks: the sums of its metrics on a lost worker are lost.
    if call is None or (call.is_over and purpose == "train"):
        return SurvivorState(run_position(worker), None if call is None else call.progress)
    undone = undone or worker.undo(call)
    if undone is Undone.IMPOSSIBLE:
        worker.has_state = False
        return SurvivorState(None)
    if undone is Undone.CALL:
        worker.loop_run = None
        # Negative where the call begins with batches of a window that was open before it.
        steps = call.cursor.step - call.first_step
        return SurvivorState(
            run_position(worker), LoopProgress(call.first_epoch, call.first_step, steps, 0, False)
        )
    is_cut_short = undone is Undone.NOTHING_AS_STEP_COUNTS
    return SurvivorState(run_position(worker), call.progress, is_cut_short=is_cut_short)


@remote_method(Communication.RUN_GROUP, OnFailure.RAISE, is_timed=True)
def join(worker: Worker, formation: Formation) -> None:
    """Take a rank in the next generation. Each worker finds its own in `formation`, so that the
    driver sends all of them the same call.

    Collective:
        Every rank of `formation`: forms the group, broadcasts the state if there are stale ranks,
        attaches the gradients' synchronisation, compares the bits. Ranks whose state is in shards
        exchange parts of a memory checkpoint, and take the next one.

    Raises:
        PeerLostError: a rank did not come, or went away.
        ReplicasDifferError: the ranks do not hold the same state; on every rank.
    """
    rank = formation.numbers.index(worker.number)
    _join_group(worker, rank, formation)
    operator, group = worker.operator, worker.operator._lockstep.context.group
    if formation.stale:
        _transfer_state(worker, group, rank, formation)
    if formation.restore is None:
        worker.snapshots.forget(formation.last_received)
        rejoin(worker.run, operator._lockstep.context, operator._lockstep.committed)
        # A sync that was attached anew does not know that gradients which wait are those of all
        # ranks. Gradients of a rank alone have been undone, and are restored nowhere.
        note_reduced(worker.run.parameters())
    else:
        go_back(worker, group, formation.restore)
    worker.expect_usual_weight()
    operator._lockstep.writes_behind_steps.note_shared()
    with_optimizers = worker.spec.options.sync != "parameter_server"
    state_broadcast.agree_on_bits(group, worker.run, worker.mesh, with_optimizers=with_optimizers)
    group.confirm()
    if formation.restore is None:
        worker.attach_audit(operator._lockstep.committed)
    else:
        take_again(worker)


def _join_group(worker: Worker, rank: int, formation: Formation) -> None:
    operator = worker.operator
    worker.take_rank(rank, formation.size, formation.local_ranks[rank])
    before = operator._lockstep.context
    if worker.before_first_collective is not None:
        worker.before_first_collective()
    if worker.process_group is not None:
        worker.leave()  # a spare whose model is in shards was a group of one
    group = worker.join_group(formation.rendezvous, before.device)
    shards = before.shard_assignment
    assignment = worker.make_shard_assignment(shards.num_shards, shards.seed, rank)
    operator._lockstep.context = replace(
        before,
        world_rank=rank,
        world_size=formation.size,
        local_rank=worker.local_rank,
        group=group,
        shard_assignment=assignment,
        is_spare=False,
        server_address=formation.rendezvous.server_address,
    )
    if assignment != shards:
        _reopen_loaders(worker, operator)


def _reopen_loaders(worker: Worker, operator: TrainingOperator) -> None:
    for purpose, cursor in worker.cursors.items():
        cursor.use(make_sharded_loader(operator, operator._lockstep.loaders[purpose], purpose))


def _transfer_state(worker: Worker, group: Group, rank: int, formation: Formation) -> None:
    if rank == formation.source:
        state_broadcast.send(group, _full_state(worker))
    elif rank in formation.stale:
        had_state, worker.has_state = worker.has_state, False
        full_state = state_broadcast.receive(group, formation.source)
        if had_state and worker.run.has_local_tensors:
            # This rank is a step behind; the local tensors of the source belong to that rank.
            full_state["state"]["local"] = copy_to_cpu(worker.local_state())
            full_state["buffers"] = with_own_local_buffers(full_state["buffers"], worker.run)
        _load_full_state(worker, full_state)
        worker.has_state = True
    else:
        state_broadcast.decline(group, formation.source)


def _full_state(worker: Worker) -> dict[str, Any]:
    """The state that another rank needs to replace this one; more than a checkpoint holds."""
    return {
        "state": worker.state_to_write(),
        "buffers": buffer_values(worker.run),
        "weighed_by": worker.operator._lockstep.weighed_by,
        "num_batches_to_recompute": worker.num_batches_to_recompute,
        "written_parameters": worker.rollback.written_parameters,
    }


def _load_full_state(worker: Worker, full_state: dict[str, Any]) -> None:
    put_buffer_values(worker.run, full_state["buffers"], worker.operator.device)
    worker.load_state(full_state["state"])
    worker.operator._lockstep.weighed_by = dict(full_state["weighed_by"])
    worker.num_batches_to_recompute = full_state["num_batches_to_recompute"]
    worker.rollback.expect_written_parameters(full_state["written_parameters"])
    worker.operator._lockstep.writes_behind_steps.note_shared()
