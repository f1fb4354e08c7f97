# SPDX-License-Identifier: Apache-2.0
"""`Regrouping`: forms the next generation of the process group from the workers that are left.

Design note. A rank commits a step only after everything of it was communicated, so no two
survivors are more than one step apart, and the furthest one holds the truth. One attempt to form
the next generation is three rounds of calls:

1. `leave_broken_group`, on every member: it leaves the group, undoes what it has not committed, and
   answers with its `SurvivorState`: how far it has come. A member that fails in this is lost as
   well, and the round is repeated with the others until all remaining members have answered.
2. The driver picks the survivor that is furthest (`_find_furthest`) as the source of the state, and
   gives free ranks to spares (`RankTable.assign_ranks`); with fewer than `min_workers` it waits for
   replacements.
3. `join`, on every member of the next generation: they meet at a new rendezvous, the source sends
   its state to members that are behind or new (`Formation.stale`), and all compare their bits.

Under ``sync="fsdp"`` no survivor has the whole state. Then `join` goes back to the newest memory
checkpoint of which all parts are left (`find_restore`), and a fourth round, `replay`, computes the
steps since then again, up to where the furthest survivor had come. If of each memory checkpoint a
part is lost, the members first read the newest checkpoint on the disk (`_read_from_disk`).

A member that dies in the third round is lost like any other, and another attempt begins with the
first round; after `_ATTEMPTS` of them the run ends. A member that received the state in the attempt
before has come as far as its source, but its own count of the call did not follow: the driver knows
the count of the source, and completes it (`_complete_progress`). Where the third round, or the
fourth, raises, members that have brought no state are lost as well, for the fault may be theirs (a
state that does not fit into a module that was edited since their `setup`, too little memory); the
next attempt goes without spares, and its error ends the run. Invariants: an attempt changes no
committed state, so that it can be repeated; and a worker has a rank in `RankTable` or is one of its
`lost_workers`, never both.

Rejected: votes of the ranks on what to do next. They would need a group that works, and the
driver, which outlives them all, knows of every death.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lockstep.checkpoint import open_checkpoint, read_own_tensors
from lockstep.engine.rank_assignment import local_ranks
from lockstep.engine.rollback_errors import rollback_impossible_error
from lockstep.error_texts import LOAD_LAST, first_line
from lockstep.errors import CheckpointError, WorkerDiedError
from lockstep.recovery.lost_worker import LostWorker
from lockstep.recovery.rank_table import RankTable
from lockstep.recovery.spare_workers import SpareWorkers
from lockstep.worker import (
    Formation,
    find_restore,
    find_restores_on_disk,
    join,
    leave_broken_group,
    read_rows,
    receive_state,
    replay,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.engine.engine_protocol import SnapshotKeeper
    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.ray_engine import RayEngine
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.operator.writes_behind_steps import WrittenBehind
    from lockstep.recovery.watchdog import Watchdog
    from lockstep.worker import (
        CheckpointOnDisk,
        LoopRequest,
        RemoteCall,
        RunPosition,
        StateRestore,
        SurvivorState,
        Worker,
    )

R = TypeVar("R")

_log = logging.getLogger("lockstep.recovery")

_ATTEMPTS: Final = 10
"""Attempts to form a generation before the run ends."""


@dataclass(frozen=True)
class NewGeneration:
    """A generation of the process group that has formed.

    Attributes:
        source: the survivor whose state all members have now.
        lost_workers: the lost workers, in the order of their loss.
        restore: how all went back to a checkpoint; None where the source sent its state.
    """

    source: SurvivorState
    lost_workers: Sequence[LostWorker]
    restore: StateRestore | None

    @property
    def position(self) -> RunPosition:
        """How far the run has come."""
        assert self.source.position is not None, "a source has the state of the run"
        return self.source.position


class Regrouping:
    """Forms the generations of a run's process group.

    Attributes:
        spares: finds the workers that are ready for a rank.
        checkpoints: those of the run on the disk; None if none are written.
    """

    def __init__(self, engine: RayEngine, min_workers: int, watchdog: Watchdog) -> None:
        self._engine = engine
        self._workers = engine.workers
        self._min_workers = min_workers
        self._watchdog = watchdog
        self.spares = SpareWorkers(engine.workers, watchdog)
        self.checkpoints: SnapshotKeeper | None = None
        # Of a regrouping that Ctrl-C has interrupted: no `NewGeneration` has reported them yet.
        self._unreported_losses: Sequence[LostWorker] = ()

    @property
    def can_grow(self) -> bool:
        """Whether a rank is free and a spare is ready to take it."""
        is_short = len(self._workers.members) < self._engine.spec.num_workers
        return is_short and bool(self.spares.ready_workers())

    def require_all_workers(self) -> None:
        """From now on form no generation with fewer workers than the run began with."""
        self._min_workers = self._engine.spec.num_workers

    def request_leave(self) -> None:
        """Ask all members to leave the group before their next batch."""
        for member in self._workers.members:
            member.request_leave()

    def run(
        self,
        interrupted: LoopRequest | None,
        lost_workers: Sequence[LostWorker],
        abandoned_because: BaseException | None = None,
    ) -> NewGeneration:
        """Form the next generation from the workers that are left.

        Args:
            interrupted: the loop that was interrupted; None if it was another call.
            lost_workers: the workers that are known to be lost, but for those that a regrouping had
                lost when Ctrl-C interrupted it.
            abandoned_because: the error for which the call ends; None if the call goes on.

        Raises:
            TrainerClosedError: no worker is lost, and none can go back to a committed step.
            WorkerDiedError: no worker is left that has the state of the run.
            NotEnoughResourcesError: fewer than `min_workers` are left, and no replacement started.
        """
        table = RankTable(self._workers.members)
        for each in (*self._unreported_losses, *lost_workers):
            table.mark_lost(each)
            self._workers.forget(each.worker)
        self._unreported_losses = table.lost_workers
        furthest: SurvivorState | None = None
        for _ in range(_ATTEMPTS):
            left = self._leave_broken_group(interrupted, abandoned_because is not None, table)
            survivors = _complete_progress(left, furthest)
            furthest = _find_furthest(survivors)
            if furthest is None and not table.lost_workers and abandoned_because is not None:
                raise rollback_impossible_error(abandoned_because)
            if furthest is None:
                raise _no_worker_left_error(table.lost_workers, list(survivors))
            if not furthest.written_behind.has_last_step:
                raise _writes_lost_error(table.lost_workers, furthest.position)
            self._workers.set_members(self._members(table))
            formation = self._formation(survivors, furthest, table)
            if formation is None:
                continue
            newcomers = _ranks_without_state(self._workers.members, survivors)
            if not self._join(formation, table, newcomers):
                continue
            if formation.restore is None or self._replay(formation.restore, table, newcomers):
                self._unreported_losses = ()
                return NewGeneration(furthest, table.lost_workers, formation.restore)
        raise WorkerDiedError(
            f"the group could not be formed in {_ATTEMPTS} attempts",
            cause="workers died, or could not reach each other, while it was being formed",
            fix=LOAD_LAST,
        )

    def _leave_broken_group(
        self, interrupted: LoopRequest | None, is_abandoned: bool, table: RankTable
    ) -> dict[WorkerHandle, SurvivorState]:
        """Let all members leave the group; a member that fails is lost. Empty if all are lost."""
        call = leave_broken_group.with_args(interrupted, is_abandoned=is_abandoned)
        while members := list(self._workers.members):
            self._watchdog.begin_call()
            pending_call = self._engine.perform(
                dict.fromkeys(range(len(members)), call),
                on_poll=self._watchdog.poll,
                on_interrupt=_ignore_interrupt,
            )
            failed = [rank for rank in range(len(members)) if rank not in pending_call.values]
            for rank in failed:
                self._mark_lost(members[rank], rank, pending_call, table)
            if not failed:
                return {members[rank]: state for rank, state in pending_call.values.items()}
        return {}

    def _mark_lost(
        self, worker: WorkerHandle, rank: int, pending_call: PendingCall[Any], table: RankTable
    ) -> None:
        """Note the loss of a worker that failed while the group was formed."""
        if (died := pending_call.deaths.get(rank)) is not None:
            self._workers.forget(worker)
        else:
            self._workers.kill(worker)
            died = WorkerDiedError(
                f"rank {rank} could not go on after a failure", cause=str(pending_call.cause())
            )
        table.mark_lost(LostWorker(worker, rank, range(0), died))

    def _members(self, table: RankTable) -> list[WorkerHandle]:
        """The members of the next generation, by rank: spares take free ranks."""
        spares = self.spares.reachable_workers() if table.admits_spares else []
        missing = self._min_workers - table.num_living
        if len(spares) < missing:
            self.spares.start_replacements(table.lost_workers)
            spares = self.spares.wait_for_spares(
                missing, have=table.num_living, min_workers=self._min_workers
            )
        return table.assign_ranks(spares, self._engine.spec.num_workers)

    def _formation(
        self,
        survivors: dict[WorkerHandle, SurvivorState],
        furthest: SurvivorState,
        table: RankTable,
    ) -> Formation | None:
        """The next generation; None if a member was lost while it read a checkpoint."""
        members = self._workers.members
        states = [survivors.get(member) for member in members]
        source = states.index(furthest)
        restore = None
        if self._engine.spec.keeps_memory_checkpoints:
            held = [() if state is None else state.held for state in states]
            on_disk = self._on_disk()
            restore = find_restore(held, furthest, on_disk[-1].step if on_disk else 0)
            if restore is None and (restore := self._read_from_disk(furthest, table)) is None:
                return None
        self._workers.generation += 1
        return Formation(
            rendezvous=self._workers.open_rendezvous(),
            numbers=tuple(member.number for member in members),
            source=source,
            # Ranks whose loop was cut short may have stopped at different lines after the step.
            stale=tuple(
                rank
                for rank, state in enumerate(states)
                if rank != source
                and restore is None
                and (furthest.is_cut_short or not _has_same_progress(state, furthest))
            ),
            local_ranks=tuple(local_ranks([member.node for member in members])),
            last_received=0 if self.checkpoints is None else self.checkpoints.latest_step,
            restore=restore,
        )

    def _on_disk(self) -> list[CheckpointOnDisk]:
        return [] if self.checkpoints is None else [*self.checkpoints.written]

    def _read_from_disk(self, furthest: SurvivorState, table: RankTable) -> StateRestore | None:
        """Let the members read their rows of the newest checkpoint that training has led on from.

        Returns:
            None if a member was lost meanwhile.

        Raises:
            WorkerDiedError: there is none, or none can be read.
        """
        keep = nullcontext() if self.checkpoints is None else self.checkpoints.keep_written()
        with keep:
            refused = None
            for restore in find_restores_on_disk(self._on_disk(), furthest):
                assert restore.directory is not None, "it is on the disk"
                _log.warning(
                    "a part of the state is lost with all workers that had it in memory: the others"
                    " go back to %s",
                    restore.directory,
                )
                try:
                    state = open_checkpoint(restore.directory)
                    return restore if self._send(state, table) else None
                except CheckpointError as error:
                    if self._engine.ended_by is not None:
                        raise
                    _log.warning("%s cannot be read: %s", restore.directory, error)
                    refused = error
        raise _parts_lost_error(table.lost_workers) from refused

    def _send(self, state: dict[str, Any], table: RankTable) -> bool:
        """Let each member read its rows, or send them; False if a member was lost meanwhile."""
        size = len(self._workers.members)
        calls = {rank: read_rows.with_args(rank, size, state) for rank in range(size)}
        if (places := self._perform(calls, table)) is None:
            return False
        for rank, place in places.items():
            if place is not None:  # its host does not see the directory
                rows = receive_state.with_args(read_own_tensors(state, *place))
                if self._perform({rank: rows}, table) is None:
                    return False
        return True

    def _join(self, formation: Formation, table: RankTable, newcomers: Sequence[int]) -> bool:
        """Let the members form the group; False if a member was lost meanwhile."""
        calls = dict.fromkeys(range(formation.size), join.with_args(formation))
        return self._perform(calls, table, newcomers) is not None

    def _replay(self, restore: StateRestore, table: RankTable, newcomers: Sequence[int]) -> bool:
        """Let the members compute lost steps again; False if a member was lost meanwhile."""
        again = replay.with_args(restore)
        calls = dict.fromkeys(range(len(self._workers.members)), again)
        return self._perform(calls, table, newcomers) is not None

    def _perform(
        self,
        calls: Mapping[int, RemoteCall[Worker, R]],
        table: RankTable,
        newcomers: Sequence[int] = (),
    ) -> Mapping[int, R] | None:
        """Make calls on members: the results by rank; None if a member was lost meanwhile.

        Args:
            newcomers: ranks that count as lost if a rank raises.
        """
        members = list(self._workers.members)
        self._watchdog.begin_call()

        def on_poll(pending_call: PendingCall[R]) -> None:
            self._watchdog.poll(pending_call)
            if pending_call.has_failed:
                self._workers.close_rendezvous()

        pending_call = self._engine.perform(
            calls,
            on_poll=on_poll,
            on_interrupt=_ignore_interrupt,
        )
        if not pending_call.is_recoverable:
            if not (newcomers and table.admits_spares):
                self._engine.results(pending_call)
            self._drop_newcomers(newcomers, pending_call, table)
        for rank in pending_call.deaths:
            if members[rank] in self._workers.members:
                self._mark_lost(members[rank], rank, pending_call, table)
        return None if pending_call.has_failed else pending_call.values

    def _drop_newcomers(
        self, newcomers: Sequence[int], pending_call: PendingCall[Any], table: RankTable
    ) -> None:
        """End the `newcomers` of an attempt in which a rank raised, and free all who wait."""
        table.admits_spares = False
        self._workers.close_rendezvous()
        self._workers.break_group(range(len(self._workers.members)))
        cause = pending_call.cause()
        assert cause is not None, "a rank raised"
        reason = f"{type(cause).__name__}: {first_line(cause)}"
        for rank, worker in [(rank, self._workers.members[rank]) for rank in newcomers]:
            _log.warning("%s cannot take rank %d: %s", worker, rank, reason)
            self._workers.kill(worker)
            died = WorkerDiedError(f"{worker} could not join as rank {rank}", cause=reason)
            died.__cause__ = cause
            table.mark_lost(LostWorker(worker, rank, range(0), died, may_be_replaced=False))


def _ignore_interrupt(_: BaseException) -> None:
    """Do nothing on Ctrl-C while the group forms: no member is in a step, and it can form later."""


def _complete_progress(
    survivors: dict[WorkerHandle, SurvivorState], sent: SurvivorState | None
) -> dict[WorkerHandle, SurvivorState]:
    """Give survivors that have come to the state `sent` the progress of the call in that state.

    Args:
        sent: the state that the attempt before has sent, or would have sent; None without one.
    """
    if sent is None:
        return survivors
    return {
        worker: replace(state, progress=sent.progress, is_cut_short=sent.is_cut_short)
        if state.position == sent.position
        else state
        for worker, state in survivors.items()
    }


def _ranks_without_state(
    members: Sequence[WorkerHandle], survivors: Mapping[WorkerHandle, SurvivorState]
) -> list[int]:
    """The ranks that have brought no state of the run: spares, for the most part."""
    states = [survivors.get(member) for member in members]
    return [n for n, state in enumerate(states) if state is None or state.position is None]


def _find_furthest(survivors: dict[WorkerHandle, SurvivorState]) -> SurvivorState | None:
    able = [state for state in survivors.values() if state.position is not None]
    return max(able, key=_progress_of, default=None)


def _progress_of(state: SurvivorState) -> tuple[tuple[int, int], WrittenBehind, bool]:
    """What tells two survivors' states apart; the larger one is further."""
    return state.position or (0, 0), state.written_behind, not state.is_cut_short


def _has_same_progress(state: SurvivorState | None, other: SurvivorState) -> bool:
    return state is not None and _progress_of(state) == _progress_of(other)


def _no_worker_left_error(
    lost_workers: Sequence[LostWorker], alive: Sequence[WorkerHandle]
) -> WorkerDiedError:
    died = _lost_error(
        "no worker is left that has the state of the run",
        lost_workers,
        cause=next((each.died.details["cause"] for each in lost_workers), None),
    )
    if alive:
        died.add_note(
            f"{', '.join(map(str, alive))} live, and cannot go back to where the step began: a loop"
            " held gradients that had not been reduced (no_sync) when an epoch or a call "
            "ended, an optimizer had stepped in a batch that cannot be computed again, or a forward"
            " wrote to weights that had not been written in the first steps; or, under"
            ' sync="fsdp", training read a Ray dataset'
        )
    return died


def _writes_lost_error(
    lost_workers: Sequence[LostWorker], position: RunPosition | None
) -> WorkerDiedError:
    steps = 0 if position is None else position.steps
    return _lost_error(
        f"what was written to weights behind step {steps} is lost",
        lost_workers,
        cause="on_train_batch_end writes to weights, the workers that are left had no samples of"
        " that step's batch, and those that had some are lost before all had what they wrote",
    )


def _parts_lost_error(lost_workers: Sequence[LostWorker]) -> WorkerDiedError:
    return _lost_error(
        "a part of the state is lost with the workers that had it",
        lost_workers,
        cause="a worker and the one that kept a copy of its part (with dp_shard_size: all that had"
        " the same rows) have died together, or the state was changed between two calls while"
        " gradients were not reduced (no_sync); and the run has written no checkpoint that it can"
        " go on from by itself: there is no checkpoint_every, the state was changed since (load,"
        " apply_all_operators), or the loop is your own",
    )


def _lost_error(
    what: str, lost_workers: Sequence[LostWorker], cause: str | None
) -> WorkerDiedError:
    lost = ", ".join(f"{each.worker}, rank {each.rank}" for each in lost_workers)
    died = WorkerDiedError(
        what,
        got=f"lost {lost}" if lost else None,
        cause=cause,
        fix=LOAD_LAST,
    )
    if lost_workers:
        died.__cause__ = lost_workers[0].died
    return died
