# SPDX-License-Identifier: Apache-2.0
"""Finds the worker that the others wait for in vain.

It judges only what it sees: a rank that makes no step while others wait for it in a collective
(or have answered already) is at fault; where everybody waits, or nobody does, no one is named.
Each worker is asked over a lane of its own, and its stack is read there, so that training pays
nothing. Who does not answer is stopped, or holds the interpreter in a call into C.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from lockstep.engine.heartbeats import Heartbeats
from lockstep.engine.worker_handle import host_answers, kill, process_state

if TYPE_CHECKING:
    from lockstep.engine.heartbeats import Heartbeat
    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.ray import RayEngine
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import WorkerStatus

_log = logging.getLogger("lockstep.recovery")

# In these a rank either makes steps, or does what takes moments. How long a function of the
# user's own may run, or a copy of a large model, nobody can say.
_TIMED: Final = frozenset({"train", "validate", "stand_down", "join"})
# The first step compiles, opens its data, and warms up caches.
_FIRST_STEP_FACTOR: Final = 10.0
_ASK_HOST_EVERY_S: Final = 1.0
# A rank in a collective of a broken group is freed by its peers' closing sockets in milliseconds.
_CASCADE_S: Final = 0.1
# Its own sockets were shut down, too: it waits for something that is not of the group.
_STUCK_IN_BROKEN_GROUP_S: Final = 5.0


class Watchdog:
    """Looks after the workers of `engine` while they perform something.

    Args:
        hang_timeout_s: how long a worker may stay at one step while others wait for it.

    Attributes:
        verdicts: why members were ended, in words.
    """

    def __init__(self, engine: RayEngine, hang_timeout_s: float) -> None:
        self._engine = engine
        self._limit_s = hang_timeout_s
        self._heartbeats = Heartbeats()
        self._broken_at: float | None = None
        self._reached: dict[str, tuple[float, bool]] = {}
        self.verdicts: dict[WorkerHandle, str] = {}

    def begin(self) -> None:
        """Another call begins."""
        self._heartbeats.forget()
        self._broken_at = None

    def last_seen(self, member: WorkerHandle) -> WorkerStatus | None:
        """What `member` was seen doing last."""
        return self._heartbeats.last_seen(member)

    def look(self, pending_call: PendingCall) -> None:
        """Ask everybody where they are, and end who hangs."""
        working = [self._engine.members[rank] for rank in pending_call.pending.values()]
        sightings = self._heartbeats.look(working)
        now = time.monotonic()
        if pending_call.has_failed and self._broken_at is None:
            self._broken_at = now
        if pending_call.deaths or pending_call.lost_peers:
            self._free_who_waits(pending_call, now)
        here = None if pending_call.here is None else pending_call.here()
        performing = len(pending_call.pending) + (here is not None)
        others_wait = performing < len(self._engine.members) or (here is not None and here.waits)
        for member, seen in sightings.items():
            if member in self.verdicts:
                continue
            if self._is_stuck(seen, now):
                self._end(member, seen, now, "stayed in a collective of a group that has broken")
                continue
            waiting = [each for each, one in sightings.items() if self._waits(one, now)]
            is_waited_for = others_wait or any(each is not member for each in waiting)
            if is_waited_for and not self._waits(seen, now):
                complaint = self._complaint(pending_call.method, member, seen, now)
                if complaint is not None:
                    self._end(member, seen, now, complaint)

    def _free_who_waits(self, pending_call: PendingCall, now: float) -> None:
        """A process that dies closes its sockets; a host that falls silent closes none."""
        assert self._broken_at is not None
        if now - self._broken_at > _CASCADE_S:
            here = () if pending_call.here is None else (0,)
            self._engine.break_group([*here, *pending_call.pending.values()])

    def _is_stuck(self, seen: Heartbeat, now: float) -> bool:
        """It waits in a group that broke long ago; what it waited for one that hung is no fault."""
        if self._broken_at is None or not self._waits(seen, now):
            return False
        return now - max(self._broken_at, seen.since) > self._broken_s

    def _waits(self, seen: Heartbeat, now: float) -> bool:
        """It answers, and stands in a collective."""
        return seen.latest is not None and seen.latest.waits and not self._is_silent(seen, now)

    def _is_silent(self, seen: Heartbeat, now: float) -> bool:
        return seen.silent_for(now) > self._broken_s / 2

    @property
    def _broken_s(self) -> float:
        return min(self._limit_s, _STUCK_IN_BROKEN_GROUP_S)

    def _complaint(
        self, method: str, member: WorkerHandle, seen: Heartbeat, now: float
    ) -> str | None:
        """Why `member`, for whom others wait, is ended; None while it may go on."""
        if seen.stands_for(now) <= self._limit_s:
            return None
        found = seen.latest
        place = "" if found is None else f", {found.phase}"
        if found is not None and found.line:
            place += f" at {found.line}"
        made_none = f"made no step for {seen.stands_for(now):.0f} s{place}"
        no_answer = f"did not answer for {seen.silent_for(now):.0f} s{place}"
        # Of these two no firsts have to be waited for, and no function of the user's.
        if _is_stopped(member):
            return f"was stopped (by a signal or a debugger) and {made_none}"
        if self._is_silent(seen, now) and not self.can_reach(member):
            return f"{no_answer}, and its host cannot be reached: its power or its network failed"
        if method not in _TIMED or not self._is_overdue(seen, now):
            return None
        if not self._is_silent(seen, now):
            return f"{made_none}, while others waited"
        return f"{no_answer}: stopped, or in a call into C that holds the interpreter"

    def can_reach(self, member: WorkerHandle) -> bool:
        """Whether the host of `member` answers; asked once for all members of a node."""
        now = time.monotonic()
        until, answers = self._reached.get(member.node, (0.0, True))
        if now > until:
            answers = host_answers(member.node)
            self._reached[member.node] = time.monotonic() + _ASK_HOST_EVERY_S, answers
        return answers

    def _is_overdue(self, seen: Heartbeat, now: float) -> bool:
        is_first = seen.latest is None or not seen.latest.is_warm
        return not is_first or seen.stands_for(now) > self._limit_s * _FIRST_STEP_FACTOR

    def _end(self, member: WorkerHandle, seen: Heartbeat, now: float, complaint: str) -> None:
        self.verdicts[member] = complaint
        stack = "" if seen.latest is None else f"; its stack:\n{seen.latest.stack}"
        _log.error("%s %s: it is ended%s", member, complaint, stack)
        kill(member, self._engine.members)


def _is_stopped(member: WorkerHandle) -> bool:
    return process_state(member) in ("T", "t")
