# SPDX-License-Identifier: Apache-2.0
"""From the workers that are left to the next generation of the group.

::

    somebody is lost -> the others leave the group, say how far they have come
                     -> places are filled: a spare for each that is lost, or fewer places
                     -> they meet, the furthest hands its state over, the bits are compared
    somebody is lost meanwhile -> once more, from the top
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lockstep.engine.interrupted_calls import no_way_back
from lockstep.engine.placement_group import local_ranks, neighbours, start_timeout_s
from lockstep.engine.spares import Readiness, look_at
from lockstep.errors import NotEnoughResourcesError, WorkerDiedError
from lockstep.worker import Formation, LoopProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.ray import RayEngine
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.recovery.watchdog import Watchdog
    from lockstep.worker import SurvivorState, WorkerStatus

_log = logging.getLogger("lockstep.recovery")

_ATTEMPTS: Final = 10
"""Formations that may fail in a row before the run ends."""

_LOOK_S: Final = 0.1

_HIRES: Final = 5
"""Processes that may die, one after the other, before one of them is ready in a place."""


@dataclass(frozen=True)
class Loss:
    """A worker that is gone, with the place it had, and what it was seen doing last."""

    member: WorkerHandle
    rank: int
    shards: range
    died: WorkerDiedError
    last_seen: WorkerStatus | None = None


@dataclass(frozen=True)
class Regrouped:
    """What came of it.

    Attributes:
        generation: the formation's number.
        size: its workers.
        point: steps of the run, and the epoch.
        replayed: steps that have to be computed again.
        progress: of the call that was interrupted.
        is_cut_short: see `SurvivorState`.
        losses: the workers that are gone, those that went meanwhile last.
    """

    generation: int
    size: int
    point: tuple[int, int]
    replayed: int
    progress: LoopProgress | None
    is_cut_short: bool
    losses: Sequence[Loss]


class Regrouping:
    """Forms generation after generation.

    Attributes:
        generation: formations so far.
    """

    def __init__(self, engine: RayEngine, min_workers: int, watchdog: Watchdog) -> None:
        self._engine = engine
        self._min_workers = min_workers
        self._watchdog = watchdog
        self._hires: Counter[int] = Counter()
        self.generation = 0

    @property
    def ready_spares(self) -> int:
        """Workers that have run their `setup` and wait."""
        return len(self._take_stock())

    @property
    def can_grow(self) -> bool:
        """A place is free, and somebody is ready to take it."""
        engine = self._engine
        return len(engine.members) < engine.spec.num_workers and bool(self._take_stock())

    def _take_stock(self) -> list[WorkerHandle]:
        ready: list[WorkerHandle] = []
        for member, starting in list(self._engine.spares):
            state, error = look_at(member, starting)
            if state is Readiness.FAILED:
                self._replace(member, error)
            elif state is Readiness.READY:
                ready.append(member)
        return ready

    def _within_reach(self) -> list[WorkerHandle]:
        """Ready spares; the host of one may have fallen silent together with a member's."""
        ready = self._take_stock()
        silent = [member for member in ready if not self._watchdog.can_reach(member)]
        for member in silent:
            self._replace(member, WorkerDiedError("its host does not answer"))
        return [member for member in ready if member not in silent]

    def _replace(self, member: WorkerHandle, error: BaseException | None) -> None:
        _log.warning("%s cannot take a place: %s", member, error)
        self._engine.bury(member)
        self._hire_again(member, error)

    def _hire_again(self, member: WorkerHandle, error: BaseException | None) -> None:
        """A process that did not live may do so elsewhere; a `setup` that raised will again."""
        if member.seat is None or not isinstance(error, WorkerDiedError):
            return
        self._hires[member.seat] += 1
        if self._hires[member.seat] <= _HIRES:
            self._engine.hire(member.seat, member.local_rank)

    def dismiss(self) -> None:
        """Ask all members to leave the group before their next batch."""
        for member in self._engine.members:
            if member.worker is not None:
                member.worker.dismiss()
            else:
                member.actor.dismiss.remote()

    def hire_for(self, losses: Sequence[Loss]) -> None:
        """Start a worker for each that is lost; it will be a spare, or take a free place."""
        for loss in losses:
            taken = {member.seat for member in self._engine.everyone}
            if loss.member.seat is not None and loss.member.seat not in taken:
                self._engine.hire(loss.member.seat, loss.member.local_rank)

    # ---------------------------------------------------------------------------- forming

    def run(
        self, method: str, losses: Sequence[Loss], given_up_for: BaseException | None = None
    ) -> Regrouped:
        """Form the next generation from who is left.

        Args:
            method: what was interrupted.
            losses: who is not left.
            given_up_for: why nobody goes on with `method`; None if it goes on.

        Raises:
            TrainerClosedError: nobody is lost, and nobody can go back to a committed step.
            WorkerDiedError: nobody is left who has the state of the run.
            NotEnoughResourcesError: fewer than `min_workers`, and no others came.
        """
        engine, lost = self._engine, list(losses)
        places: list[WorkerHandle | None] = list(engine.members)
        for loss in losses:
            places[places.index(loss.member)] = None
            engine.forget(loss.member)
        for _ in range(_ATTEMPTS):
            survivors = self._stand_down((method, given_up_for is not None), places, lost)
            best = _best(survivors)
            if best is None and not lost and given_up_for is not None:
                raise no_way_back(given_up_for)
            if best is None:
                raise _nobody_left(lost, list(survivors))
            roster = self._fill(places, lost)
            formation = self._formation(roster, survivors, best)
            if self._form(formation, lost, places):
                return self._regrouped(len(roster), best, lost)
        raise WorkerDiedError(
            f"the group could not be formed in {_ATTEMPTS} attempts",
            cause="workers died, or could not reach each other, while it was being formed",
            fix="build a new trainer and load the last checkpoint",
        )

    def _stand_down(
        self, interrupted: tuple[str, bool], places: list[WorkerHandle | None], lost: list[Loss]
    ) -> dict[WorkerHandle, SurvivorState]:
        """Everybody leaves the group; who cannot is lost as well."""
        engine = self._engine
        while True:
            self._watchdog.begin()
            members = list(engine.members)
            ranks = range(len(members))
            guard = self._watchdog.look
            pending_call = engine.hear("stand_down", interrupted, ranks, guard=guard, leave=_stay)
            failed = [rank for rank in ranks if rank not in pending_call.values]
            for rank in failed:
                self._lose(members[rank], pending_call, rank, places, lost)
            if not failed:
                return {members[rank]: survivor for rank, survivor in pending_call.values.items()}

    def _lose(
        self,
        member: WorkerHandle,
        pending_call: PendingCall,
        rank: int,
        places: list[WorkerHandle | None],
        lost: list[Loss],
    ) -> None:
        died = pending_call.deaths.get(rank)
        if died is None:
            died = WorkerDiedError(
                f"rank {rank} could not go on after a failure", cause=str(pending_call.cause())
            )
        if member in places:
            places[places.index(member)] = None
        lost.append(Loss(member, rank, range(0), died))
        if rank in pending_call.deaths:
            self._engine.forget(member)
        else:
            self._engine.bury(member)

    def _fill(
        self, places: list[WorkerHandle | None], losses: Sequence[Loss]
    ) -> list[WorkerHandle]:
        """Spares in the free places; the members of the next generation, by rank."""
        engine = self._engine
        ready = self._within_reach()
        if sum(place is not None for place in places) + len(ready) < self._min_workers:
            ready = self._wait_for_more(places, losses)
        while len(places) < engine.spec.num_workers:
            places.append(None)
        for index, place in enumerate(places):
            if place is None and ready:
                places[index] = ready.pop(0)
        taken = [place for place in places if place is not None]
        # A spare of another host belongs to the ranks of that host. Which process computes a
        # rank's shards changes no bit, and rank 0 in the driver's process stays the first one.
        engine.line_up(neighbours(taken, lambda member: member.node))
        return engine.members

    def _wait_for_more(
        self, places: Sequence[WorkerHandle | None], losses: Sequence[Loss]
    ) -> list[WorkerHandle]:
        left = sum(place is not None for place in places)
        wanted, patience_s = self._min_workers, start_timeout_s()
        _log.warning(
            "%d workers are left, min_workers=%d: waiting for others to start", left, wanted
        )
        self.hire_for(losses)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            ready = self._within_reach()
            if left + len(ready) >= wanted:
                return ready
            if not self._engine.spares:
                break
            self._engine.pause(_LOOK_S)
        raise NotEnoughResourcesError(
            "too few workers are left",
            where=f"after waiting {patience_s:.0f} s for others",
            expected=f"min_workers={wanted}",
            got=f"{left}",
            cause="the cluster has no room for replacements, or they could not start",
            fix="a smaller min_workers, spare_workers, or a new trainer from the last checkpoint",
        )

    def _formation(
        self,
        roster: Sequence[WorkerHandle],
        survivors: dict[WorkerHandle, SurvivorState],
        best: SurvivorState,
    ) -> Formation:
        self.generation += 1
        found = [survivors.get(member) for member in roster]
        source = found.index(best)
        return Formation(
            rendezvous=self._engine.rendezvous(self.generation),
            size=len(roster),
            source=source,
            # Ranks that were cut short may have come to different lines behind the step.
            stale=tuple(
                rank
                for rank, one in enumerate(found)
                if rank != source and (best.is_cut_short or not _agrees(one, best))
            ),
            local_ranks=tuple(local_ranks([member.node for member in roster])),
        )

    def _form(
        self, formation: Formation, lost: list[Loss], places: list[WorkerHandle | None]
    ) -> bool:
        engine = self._engine
        self._watchdog.begin()

        def guard(pending_call: PendingCall) -> None:
            self._watchdog.look(pending_call)
            if pending_call.has_failed:
                engine.call_off()

        members = list(engine.members)
        pending_call = engine.hear(
            "join",
            (),
            range(len(members)),
            guard=guard,
            args_of=lambda rank: (rank, formation),
            leave=_stay,
        )
        if not pending_call.is_recoverable:
            engine.conclude(pending_call)
        for rank in pending_call.deaths:
            self._lose(members[rank], pending_call, rank, places, lost)
        return not pending_call.has_failed

    def _regrouped(self, size: int, best: SurvivorState, lost: Sequence[Loss]) -> Regrouped:
        assert best.point is not None
        return Regrouped(
            generation=self.generation,
            size=size,
            point=best.point,
            replayed=1 if best.progress is not None and not best.progress.is_over else 0,
            progress=best.progress,
            is_cut_short=best.is_cut_short,
            losses=lost,
        )


def _stay(_: BaseException) -> None:
    """Ctrl-C while the group is formed: nobody is in a step, and it can be formed later."""


def _best(survivors: dict[WorkerHandle, SurvivorState]) -> SurvivorState | None:
    able = [survivor for survivor in survivors.values() if survivor.point is not None]
    return max(able, key=lambda one: (one.point or (0, 0), not one.is_cut_short), default=None)


def _agrees(one: SurvivorState | None, best: SurvivorState) -> bool:
    return one is not None and (one.point, one.is_cut_short) == (best.point, best.is_cut_short)


def _nobody_left(losses: Sequence[Loss], alive: Sequence[WorkerHandle]) -> WorkerDiedError:
    who = ", ".join(f"{loss.member}, rank {loss.rank}" for loss in losses)
    died = WorkerDiedError(
        "no worker is left that has the state of the run",
        got=f"lost {who}",
        cause=next((loss.died.details["cause"] for loss in losses), None),
        fix="build a new trainer and load the last checkpoint",
    )
    if alive:
        died.add_note(
            f"{', '.join(map(str, alive))} live, and cannot go back to where the step began: a loop"
            " held gradients that had not been reduced (no_sync) when an epoch or a call "
            "ended, an optimizer had stepped in a batch that cannot be computed again, or a forward"
            " wrote to weights that had not been written in the first steps"
        )
    if losses:
        died.__cause__ = losses[0].died
    return died
