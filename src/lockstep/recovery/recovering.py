# SPDX-License-Identifier: Apache-2.0
"""Calls on all workers that go on when a worker dies."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lockstep.data import shards_of
from lockstep.engine.interrupted_calls import made_room, note_left, warn_of_cut_short_step
from lockstep.errors import LockstepError, PoisonedStepError, WorkerDiedError
from lockstep.recovery.incident import Incident
from lockstep.recovery.lost_counts import LostCounts
from lockstep.recovery.poisoned_batch import Deaths
from lockstep.recovery.regrouping import Loss, Regrouping
from lockstep.recovery.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine import PoolStatus
    from lockstep.engine.base import SnapshotFetcher, SnapshotKeeper, Watch
    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.ray import RayEngine
    from lockstep.operator import TrainingOperator
    from lockstep.recovery.policy import Policy
    from lockstep.recovery.regrouping import Regrouped

_log = logging.getLogger("lockstep.recovery")

RESUMED: Final = frozenset({"train", "validate"})
"""Go on where they were interrupted."""

REPEATED: Final = frozenset(
    {
        "whole",
        "state_dict",
        "state_to_write",
        "averaged_models",
        "models",
        "operator_state",
        "check_state",
        "apply_state",
        "steps_ahead",
        "position",
        "predict",
        "verify",
    }
)
"""Change nothing, or the same again. Whoever else was interrupted may have happened in part."""

LEAVABLE: Final = RESUMED | REPEATED - {"apply_state"}
"""May be left in the middle, with all workers alive: the run is as before, or can be taken back."""

MEETING: Final = frozenset({"verify"})
"""Form a further group: who waits there for somebody holds no line to him yet."""


class RecoveringEngine:
    """An engine whose group forms anew when it breaks; see `Engine`.

    Args:
        engine: whose workers these are.
        policy: how much may be lost.
    """

    def __init__(self, engine: RayEngine, policy: Policy) -> None:
        self._engine = engine
        self._watchdog = Watchdog(engine, policy.hang_timeout_s)
        self._regrouping = Regrouping(engine, policy.min_workers, self._watchdog)
        self._deaths = Deaths()
        self._incidents: list[Incident] = []
        self._has_dismissed = False
        self._to_replace: list[Loss] = []
        self.left: BaseException | None = None
        self._left_method = ""
        # Once other bits, always other bits: what was computed by fewer workers stays.
        self._has_same_bits = True

    @property
    def ended(self) -> BaseException | None:
        return self._engine.ended

    @property
    def started(self) -> list[dict[str, Any]]:
        return self._engine.started

    def local_operator(self) -> TrainingOperator | None:
        return self._engine.local_operator()

    def bring_snapshots(self, to: SnapshotKeeper) -> SnapshotFetcher:
        return self._engine.bring_snapshots(to)

    def close(self, *, force: bool) -> None:
        # Whoever was left in the middle of a step may be there for long.
        was_left, self.left = self.left is not None, None  # whose room is given back here
        self._engine.close(force=force or was_left)

    def cut_anew(self, num_shards: int) -> None:
        self._engine.cut_anew(num_shards)

    def roster(self) -> PoolStatus:
        return replace(
            self._engine.roster(),
            generation=self._regrouping.generation,
            spares=self._regrouping.ready_spares,
            recoveries=[incident.as_dict() for incident in self._incidents],
        )

    def call(
        self,
        method: str,
        *args: Any,
        watch: Watch | None = None,
        retries: int = 3,
    ) -> list[Any]:
        return self._call(method, args, None, watch, retries)

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return self._call(method, args, rank, None, 3)[0]

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        rank: int | None,
        watch: Watch | None,
        retries: int,
    ) -> list[Any]:
        self._deaths, given = Deaths(), retries
        self._muster(method)
        attempt, lost = args, LostCounts(self._engine, method)
        while True:
            ranks = range(len(self._engine.members)) if rank is None else [rank]
            pending_call = self._hear(method, attempt, ranks, watch)
            self._replace_the_lost()
            if not pending_call.has_failed:
                return [*self._engine.conclude(pending_call), *lost.reports]
            # Who was asked to leave for a newcomer has not failed.
            retries -= 0 if self._has_dismissed and not pending_call.deaths else 1
            if (
                pending_call.is_recoverable
                and retries < 0
                and (cause := pending_call.cause()) is not None
            ):
                cause.add_note(
                    f"workers were lost {given + 1} times in this call: max_retries={given} is"
                    f" used up; {method}(max_retries=...) allows more"
                )
            if not pending_call.is_recoverable or retries < 0:
                self._leave_if_all_live(pending_call)
                return self._engine.conclude(pending_call)
            regrouped = self._recover(pending_call)
            lost.note(regrouped)
            if method in RESUMED and regrouped.progress is not None:
                attempt = (*args, regrouped.progress)
            elif method not in REPEATED and method not in RESUMED:
                self._replace_the_lost()
                raise _happened_in_part(pending_call)

    def _hear(
        self,
        method: str,
        args: tuple[Any, ...],
        ranks: Sequence[int],
        watch: Watch | None,
    ) -> PendingCall:
        self._watchdog.begin()
        self._has_dismissed = False
        told = None if watch is None else partial(self._tell, watch)
        return self._engine.hear(
            method,
            args,
            ranks,
            watch=told,
            guard=self._guard,
            leave=partial(self._leave, method),
        )

    def _tell(self, watch: Watch, progress: dict[str, Any]) -> int:
        there = {"workers": len(self._engine.members), "recoveries": len(self._incidents)}
        return watch({**progress, **there} if progress else progress)

    def _guard(self, pending_call: PendingCall) -> None:
        self._replace_the_lost()
        self._watchdog.look(pending_call)
        if pending_call.method in MEETING and pending_call.deaths:
            # Somebody died after the roll call.
            self._engine.call_off()
        if pending_call.method == "train" and not self._has_dismissed and self._regrouping.can_grow:
            # Each leaves before its next batch; whoever is in a step then fails in it.
            self._has_dismissed = True
            self._regrouping.dismiss()

    def _muster(self, method: str) -> None:
        """Before a call: newcomers take their places, and who died meanwhile is replaced."""
        # Who meets somebody for the first time cannot hear of his death: all have to be there.
        may_repeat = (method in RESUMED or method in REPEATED) and method not in MEETING
        if not self._regrouping.can_grow and may_repeat:
            return
        pending_call = self._engine.roll_call()
        if pending_call.deaths or self._regrouping.can_grow:
            self._recover(pending_call)

    # ---------------------------------------------------------------------------- leaving

    def _leave_if_all_live(self, pending_call: PendingCall) -> None:
        """A failure of the user's code ends its call; the workers, and their server, go on.

        Raises:
            The failure.
        """
        cause = pending_call.cause()
        if cause is None or pending_call.deaths or isinstance(cause, WorkerDiedError):
            return
        if pending_call.method in RESUMED:
            self._leave(pending_call.method, cause)
            raise cause

    def _leave(self, method: str, error: BaseException) -> None:
        """Leave the workers alone with a call; whoever waits for another one in it is freed.

        Nobody is waited for here: the error arrives at once, and `settle` does the rest when it is
        known that there will be a next call.
        """
        if method not in LEAVABLE or not isinstance(error, Exception | KeyboardInterrupt):
            self._engine.end(error)
            return
        self.left, self._left_method = error, method
        self._regrouping.dismiss()
        self._engine.break_group(range(len(self._engine.members)))
        self._engine.rescue(error)
        note_left(self)

    def give_up(self) -> None:
        """End the workers, which nobody has asked for anything since they were left."""
        cause, self.left = self.left, None
        if cause is not None:
            gone = made_room(cause)
            _log.warning("%s; the next time: %s", gone.what, gone.details["fix"])
            self._engine.end(gone)

    def settle(self) -> None:
        cause, began = self.left, time.monotonic()
        if cause is None:
            return
        try:
            regrouped = self._regrouping.run(self._left_method, [], given_up_for=cause)
        except LockstepError as error:
            error.__cause__ = error.__cause__ or cause
            self._engine.end(error)
        else:
            # A worker that died since the call was left is an incident like any other.
            self._note(self._left_method, regrouped, time.monotonic() - began, has_failed=False)
            self._to_replace += regrouped.losses
            if regrouped.is_cut_short:
                warn_of_cut_short_step(regrouped.point[0], cause)
        self.left = None

    # ------------------------------------------------------------------------- recovering

    def _recover(self, pending_call: PendingCall) -> Regrouped:
        began = pending_call.failed_at or time.monotonic()
        try:
            regrouped = self._regrouping.run(pending_call.method, self._losses(pending_call))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._leave(pending_call.method, error)
            else:
                self._engine.end(error)
            raise
        seconds = time.monotonic() - began
        self._note(pending_call.method, regrouped, seconds, has_failed=pending_call.has_failed)
        self._stop_poison(pending_call, regrouped)
        self._to_replace += regrouped.losses
        return regrouped

    def _replace_the_lost(self) -> None:
        """Not at once: a process that starts takes time from the step that all wait for."""
        losses, self._to_replace = self._to_replace, []
        self._regrouping.hire_for(losses)

    def _losses(self, pending_call: PendingCall) -> list[Loss]:
        members, size = list(self._engine.members), len(self._engine.members)
        num_shards = self._engine.spec.num_shards
        return [
            Loss(
                members[rank],
                rank,
                shards_of(rank, size, num_shards),
                died,
                self._watchdog.last_seen(members[rank]),
            )
            for rank, died in pending_call.deaths.items()
        ]

    def _note(self, method: str, regrouped: Regrouped, seconds: float, *, has_failed: bool) -> None:
        losses, spec = regrouped.losses, self._engine.spec
        is_whole = regrouped.size == spec.num_workers
        self._has_same_bits &= spec.options.reproducible or is_whole
        if not losses and (self._has_dismissed or not has_failed):
            _log.info("generation %d has %d workers", regrouped.generation, regrouped.size)
            return
        incident = Incident(
            at=time.time(),
            lost=tuple(f"{loss.member}, rank {loss.rank}" for loss in losses),
            why="; ".join(self._why(loss) for loss in losses) or "the connections broke",
            during=self._during(method, losses),
            step=regrouped.point[0],
            replayed=regrouped.replayed,
            seconds=seconds,
            generation=regrouped.generation,
            workers=regrouped.size,
            same_bits=self._has_same_bits,
        )
        self._incidents.append(incident)
        _log.warning("%s", incident)

    def _why(self, loss: Loss) -> str:
        return self._watchdog.verdicts.get(loss.member) or loss.died.details["cause"] or "died"

    def _during(self, method: str, losses: Sequence[Loss]) -> str:
        seen = [found.phase for loss in losses if (found := loss.last_seen) is not None]
        return f"{method} ({', '.join(seen)})" if seen else method

    def _stop_poison(self, pending_call: PendingCall, regrouped: Regrouped) -> None:
        if pending_call.method not in RESUMED:
            return
        for loss in regrouped.losses:
            fatal = self._deaths.note((pending_call.method, *regrouped.point), loss.shards)
            if fatal:
                error = self._poisoned(pending_call.method, fatal, regrouped, loss)
                self._engine.end(error)
                raise error

    def _poisoned(
        self, method: str, shards: Sequence[int], regrouped: Regrouped, loss: Loss
    ) -> PoisonedStepError:
        purpose = "train" if method == "train" else "validation"
        items = self._engine.call_rank(0, "items_ahead", purpose, list(shards))
        return PoisonedStepError(
            "the same samples have ended the worker that computed them, and two in its place",
            where=f"step {regrouped.point[0]}, shard {', '.join(map(str, shards))}",
            got=f"samples {items}" if items else None,
            cause=self._why(loss),
            fix="look at these samples (too large for the memory? a crash in native code?), leave"
            " them out, and go on from the last checkpoint",
        )


def _happened_in_part(pending_call: PendingCall) -> BaseException:
    cause = pending_call.cause()
    died = WorkerDiedError(
        f"a worker died during {pending_call.method}, which may have happened on the others",
        cause=None if cause is None else str(cause).splitlines()[0],
        fix="the workers are complete again, with the survivors' state: look at it, and call again"
        " if that is right",
    )
    died.__cause__ = cause
    return died
