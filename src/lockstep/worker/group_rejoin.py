# SPDX-License-Identifier: Apache-2.0
"""Leaving a process group that has broken, and joining the next one in the same process.

`leave_broken_group` undoes the step that is not committed. `join` enters the next group, where the
ranks that are behind load the state of the one that is furthest. The driver calls both
(`recovery.regrouping`), once it knows which workers are lost.

A rank commits a step only after all communication of the step, so that its weights then hold every
rank's contribution; and no rank can finish the communication of the next step before all ranks have
entered it. So the surviving ranks are at most one step apart: those behind load the state of the
furthest, and the step that no rank has committed is computed again.

The state that travels is that of a checkpoint (see `state_dict`), and what a checkpoint leaves to
`setup`: which parameters train, buffers that are not persistent, gradients of an open window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.group import Group
from lockstep.operator.sync_setup import rejoin
from lockstep.worker import state_broadcast
from lockstep.worker.loader_sharding import make_sharded_loader
from lockstep.worker.loop_run import LoopProgress
from lockstep.worker.remote_method import Communication, OnFailure, remote_method
from lockstep.worker.saved_gradients import SavedGradients
from lockstep.worker.worker import Undone

if TYPE_CHECKING:
    import torch

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.worker.process_group import Rendezvous
    from lockstep.worker.worker import Worker


class RunPosition(NamedTuple):
    """How far a worker has come; a worker that is further has a larger position.

    Attributes:
        steps: the committed steps of the run.
        epoch: the epoch of the training data.
    """

    steps: int
    epoch: int


@dataclass(frozen=True)
class SurvivorState:
    """How far a worker has come, after it has left its group.

    Attributes:
        position: how far its state has come; None if it has no state of the run (it is a spare, or
            an optimizer stepped in the middle of a batch that cannot be computed again).
        progress: the progress of the interrupted call; None without one.
        is_cut_short: a loop of the user's own failed after the last step's optimizers, so that its
            code after them did not run.
    """

    position: RunPosition | None
    progress: LoopProgress | None = None
    is_cut_short: bool = False


@dataclass(frozen=True)
class Formation:
    """The next generation of the group.

    Attributes:
        source: the rank whose state the others load.
        stale: ranks that load the state of `source`.
        local_ranks: each rank's index among the ranks of its host.
    """

    rendezvous: Rendezvous
    size: int
    source: int
    stale: tuple[int, ...]
    local_ranks: tuple[int, ...]


@remote_method(Communication.NONE, OnFailure.RAISE, is_timed=True)
def leave_broken_group(
    worker: Worker, interrupted: str | None, *, is_abandoned: bool = False
) -> SurvivorState:
    """Leave the group and undo the step that was not committed. Idempotent.

    Args:
        interrupted: the purpose of the loop that not all workers have completed; None if another
            call was interrupted.
        is_abandoned: the call does not go on: it has ended with the last committed step.
    """
    survivor = _leave_broken_group(worker, interrupted)
    if is_abandoned and survivor.position is not None:
        call, worker.loop_run, worker.before_call = worker.loop_run, None, None
        if call is not None and interrupted == "train":
            # The first batches of the open window belong to an earlier call, which counted them.
            worker.num_batches_to_recompute = max(
                worker.num_batches_to_recompute, -call.committed.steps
            )
        return SurvivorState(survivor.position, is_cut_short=survivor.is_cut_short)
    return survivor


def undo_without_peers(worker: Worker, interrupted: str | None) -> SurvivorState:
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
    state.context = replace(state.context, group=Group(None, state.context.device))
    worker.snapshots.forget()
    rejoin(worker.run, state.context, state.committed)
    worker.expect_usual_weight()
    worker.attach_audit(state.committed)
    return survivor


def _leave_broken_group(worker: Worker, interrupted: str | None) -> SurvivorState:
    cursor = worker.cursors.get("train")
    is_unreduced = cursor is not None and worker.rollback.holds_unreduced_gradients(cursor)
    worker.leave()
    if not worker.has_state:
        return SurvivorState(None)
    # A dataset of Ray's was split for the ranks of the group that is left.
    worker.feed(None, None)
    call = worker.loop_run if interrupted is not None else None
    if is_unreduced:
        # No other rank has these gradients, and those of a lost worker are lost: all ranks begin
        # the window anew.
        if call is not None and interrupted == "train":
            call.is_over = False
        elif not worker.return_to_window():
            worker.has_state = False
            return SurvivorState(None)
    # A rank that has trained to the end of the call is ahead. A validation is done again by all
    # ranks: the sums of its metrics on a lost worker are lost.
    if call is None or (call.is_over and interrupted == "train"):
        return SurvivorState(_position(worker), None if call is None else call.progress)
    undone = worker.undo(call)
    if undone is Undone.IMPOSSIBLE:
        worker.has_state = False
        return SurvivorState(None)
    if undone is Undone.CALL:
        worker.loop_run = None
        # Negative where the call begins with batches of a window that was open before it.
        steps = call.cursor.step - call.first_step
        return SurvivorState(
            _position(worker), LoopProgress(call.first_epoch, call.first_step, steps, 0, False)
        )
    is_cut_short = undone is Undone.NOTHING_AS_STEP_COUNTS
    return SurvivorState(_position(worker), call.progress, is_cut_short=is_cut_short)


def _position(worker: Worker) -> RunPosition:
    epoch = worker.cursors["train"].epoch if "train" in worker.cursors else 0
    return RunPosition(worker.operator._lockstep.committed, epoch)


@remote_method(Communication.RUN_GROUP, OnFailure.RAISE, is_timed=True)
def join(worker: Worker, rank: int, formation: Formation) -> None:
    """Become rank `rank` of the next generation.

    Collective:
        Every rank of `formation`: forms the group, broadcasts the state if there are stale ranks,
        attaches the gradients' synchronisation, compares the bits.

    Raises:
        PeerLostError: a rank did not come, or went away.
        ReplicasDifferError: the ranks do not hold the same state; on every rank.
    """
    _join_group(worker, rank, formation)
    operator, group = worker.operator, worker.operator._lockstep.context.group
    if formation.stale:
        _transfer_state(worker, group, rank, formation)
    worker.snapshots.forget()
    rejoin(worker.run, operator._lockstep.context, operator._lockstep.committed)
    worker.expect_usual_weight()
    with_optimizers = worker.spec.options.sync != "parameter_server"
    state_broadcast.agree_on_bits(group, worker.run, with_optimizers=with_optimizers)
    group.confirm()
    worker.attach_audit(operator._lockstep.committed)


def _join_group(worker: Worker, rank: int, formation: Formation) -> None:
    operator = worker.operator
    worker.take_rank(rank, formation.size, formation.local_ranks[rank])
    before = operator._lockstep.context
    if worker.before_first_collective is not None:
        worker.before_first_collective()
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
        worker.has_state = False
        _load_full_state(worker, state_broadcast.receive(group, formation.source))
        worker.has_state = True
    else:
        state_broadcast.decline(group, formation.source)


def _full_state(worker: Worker) -> dict[str, Any]:
    """The state that another rank needs to replace this one; more than a checkpoint holds."""
    run, window_gradients = worker.run, worker.rollback.window_gradients()
    return {
        "state": worker.state_to_write(),
        "requires_grad": [parameter.requires_grad for parameter in run.parameters()],
        "buffers": _buffers(run),
        "weighed_by": worker.operator._lockstep.weighed_by,
        "window_gradients": None if window_gradients is None else list(window_gradients.gradients),
        "num_batches_to_recompute": worker.num_batches_to_recompute,
        "written_parameters": worker.rollback.written_parameters,
    }


def _load_full_state(worker: Worker, full_state: dict[str, Any]) -> None:
    worker.load_state(full_state["state"])
    run: TrainingParts = worker.run
    for parameter, flag in zip(run.parameters(), full_state["requires_grad"], strict=True):
        parameter.requires_grad_(flag)
    for mine, theirs in zip(_buffers(run), full_state["buffers"], strict=True):
        mine.data = theirs.to(mine.device, copy=True)
    worker.operator._lockstep.weighed_by = dict(full_state["weighed_by"])
    if full_state["window_gradients"] is not None:
        gradients = SavedGradients(full_state["window_gradients"])
        worker.rollback.restore_window_gradients(gradients)
    worker.num_batches_to_recompute = full_state["num_batches_to_recompute"]
    worker.rollback.expect_written_parameters(full_state["written_parameters"])


def _buffers(run: TrainingParts) -> list[torch.Tensor]:
    """All buffers, those included that are not persistent, which a checkpoint omits."""
    modules = [*run.modules(), *run.averages]
    return [buffer for module in modules for buffer in module.buffers()]
