# SPDX-License-Identifier: Apache-2.0
"""`Watchdog`: finds the worker that the others wait for in vain, or that errs, and ends it.

A rank that makes no step while others wait for it in a collective (or have answered already) is at
fault; where all ranks wait, or none does, the watchdog ends no rank. Where all that are left in a
loop wait for one that has left it, it ends the call (see `deserted_ranks`). It asks workers in the
`control` concurrency group of their actors, so that training pays nothing. A worker that does not
answer is stopped, or holds the interpreter in a call into C.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from lockstep.engine.actor_termination import kill_worker
from lockstep.engine.liveness_probes import is_node_reachable, process_state
from lockstep.engine.status_polling import StatusPoller
from lockstep.recovery.deserted_ranks import DesertedRanks
from lockstep.recovery.polling_clock import PollingClock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.status_polling import PolledStatus
    from lockstep.engine.worker_group import WorkerGroup
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import LoopCounts, WorkerStatus

_log = logging.getLogger("lockstep.recovery")

# A worker's first step compiles, opens its data, and warms up caches.
_FIRST_STEP_FACTOR: Final = 10.0
_ASK_HOST_EVERY_S: Final = 1.0
# Peers that close their sockets free a rank in a collective of a broken group in milliseconds.
_CASCADE_S: Final = 0.1
# After its own sockets were shut down a rank can only wait for something outside of the group.
_STUCK_IN_BROKEN_GROUP_S: Final = 5.0


class Watchdog:
    """Polls workers while they perform a call, and ends a worker that hangs.

    Args:
        hang_timeout_s: how long a worker may stay at one step while others wait for it.
        shadow_limit: so many wrong shards of one process are too many.

    Attributes:
        verdicts: why workers were ended, in words, by worker.
    """

    def __init__(self, workers: WorkerGroup, hang_timeout_s: float, shadow_limit: int) -> None:
        self._workers = workers
        self._limit_s = hang_timeout_s
        self._shadow_limit = shadow_limit
        self._clock = PollingClock()
        self._poller = StatusPoller()
        self._deserted = DesertedRanks(hang_timeout_s)
        self._broken_at: float | None = None
        # A thread that writes a checkpoint waits for workers as well, while a call runs.
        self._polling = threading.Lock()
        self._reachable_nodes: dict[str, tuple[float, bool]] = {}
        self.verdicts: dict[WorkerHandle, str] = {}

    def begin_call(self) -> None:
        """Forget the answers of the remote call before, but not the counts."""
        with self._polling:
            self._poller.clear()
            self._broken_at = None

    def last_seen(self, worker: WorkerHandle) -> WorkerStatus | None:
        """The last known status of `worker`."""
        return self._poller.last_seen(worker)

    def forget_counts(self) -> None:
        """Forget what workers have counted, because a loop begins, or begins again."""
        self._poller.forget_counts()

    def last_counts(self, worker: WorkerHandle) -> LoopCounts | None:
        """The last known counts of `worker` in the loop, from before or after a recovery."""
        return self._poller.last_counts(worker)

    def end_stopped_workers(self) -> None:
        """Outside of a call in which ranks wait for each other, where the driver waits for workers:
        end those that have been stopped, or whose machines have not answered, for too long."""
        with self._polling:
            now, members = self._clock.tick(), list(self._workers.members)
            for worker, polled in self._poller.poll(members, now).items():
                # No worker hangs that writes to a disk for long.
                fault = self._find_fault(worker, polled, now, is_timed=False)
                if fault is not None and worker not in self.verdicts:
                    self._end_worker(worker, polled, fault)

    def poll(self, pending_call: PendingCall[Any]) -> None:
        """Ask all ranks that still perform for their status, and end ranks that hang."""
        with self._polling:
            self._poll(pending_call)

    def _poll(self, pending_call: PendingCall[Any]) -> None:
        performing = [self._workers.members[rank] for rank in pending_call.performing]
        now = self._clock.tick()
        statuses = self._poller.poll(performing, now)
        if pending_call.has_failed and self._broken_at is None:
            self._broken_at = now
        if pending_call.deaths or pending_call.lost_peers:
            self._free_waiting_ranks(pending_call, now)
        local = None if pending_call.local_status is None else pending_call.local_status()
        self._end_deserted_call(pending_call, statuses, local, now)
        num_performing = len(performing) + (local is not None)
        others_wait = num_performing < len(self._workers.members) or (
            local is not None and local.waits
        )
        for worker, polled in statuses.items():
            if worker in self.verdicts:
                continue
            if polled.latest is not None and polled.latest.num_wrong_shards >= self._shadow_limit:
                wrong = f"computed wrong bits {polled.latest.num_wrong_shards} times"
                self._end_worker(worker, polled, f"{wrong} (shadow_limit={self._shadow_limit})")
                continue
            if self._is_stuck(polled, now):
                verdict = "stayed in a collective of a group that has broken"
                self._end_worker(worker, polled, verdict)
                continue
            waiting = [each for each, one in statuses.items() if self._waits(one, now)]
            is_waited_for = others_wait or any(each is not worker for each in waiting)
            if is_waited_for and not self._waits(polled, now):
                if polled.without_step_for(now) > self._limit_s / 2:
                    # Else a rank would be at fault that a stopped relay has not brought the call.
                    pending_call.ask_behind_relays()
                is_timed = pending_call.contract.is_timed
                fault = self._find_fault(worker, polled, now, is_timed=is_timed)
                if fault is not None:
                    self._end_worker(worker, polled, fault)

    def _end_deserted_call(
        self,
        pending_call: PendingCall[Any],
        statuses: Mapping[WorkerHandle, PolledStatus],
        local: WorkerStatus | None,
        now: float,
    ) -> None:
        """Fail the call, and free its ranks, if all of them wait for a rank that has left it."""
        by_rank: dict[int, WorkerStatus | None] = {} if local is None else {0: local}
        for rank in pending_call.performing:
            polled = statuses.get(self._workers.members[rank])
            answers = polled is not None and not self._is_silent(polled, now)
            by_rank[rank] = polled.latest if polled is not None and answers else None
        error = self._deserted.find_error(pending_call, by_rank, now)
        if error is not None:
            # First the cause: the ranks that are freed report that they have lost their peers.
            pending_call.fail(min(pending_call.values), error, peer_lost=False)
            self._workers.break_group(by_rank)

    def _free_waiting_ranks(self, pending_call: PendingCall[Any], now: float) -> None:
        """Shut down the sockets of ranks that still wait some time after the group broke.

        A process that dies closes its sockets, which frees its peers; a silent host closes none.
        """
        assert self._broken_at is not None
        if now - self._broken_at > _CASCADE_S:
            local = () if pending_call.local_status is None else (0,)
            self._workers.break_group([*local, *pending_call.performing])

    def _is_stuck(self, polled: PolledStatus, now: float) -> bool:
        """Whether the rank waits in a group that broke long ago.

        The time that it waited for a hanging rank before the group broke does not count.
        """
        if self._broken_at is None or not self._waits(polled, now):
            return False
        return now - max(self._broken_at, polled.since) > self._broken_timeout_s

    def _waits(self, polled: PolledStatus, now: float) -> bool:
        """Whether the rank answers, and waits in a collective."""
        is_in_collective = polled.latest is not None and polled.latest.waits
        return is_in_collective and not self._is_silent(polled, now)

    def _is_silent(self, polled: PolledStatus, now: float) -> bool:
        return polled.silent_for(now) > self._broken_timeout_s / 2

    @property
    def _broken_timeout_s(self) -> float:
        return min(self._limit_s, _STUCK_IN_BROKEN_GROUP_S)

    def _find_fault(
        self, worker: WorkerHandle, polled: PolledStatus, now: float, *, is_timed: bool
    ) -> str | None:
        """The reason to end `worker`, for which others wait; None while it may go on."""
        if polled.without_step_for(now) <= self._limit_s:
            return None
        found = polled.latest
        place = "" if found is None else f", {found.phase.value}"
        if found is not None and found.line:
            place += f" at {found.line}"
        made_none = f"made no step for {polled.without_step_for(now):.0f} s{place}"
        no_answer = f"did not answer for {polled.silent_for(now):.0f} s{place}"
        # These two faults need no patience for a first step, or for a user's function.
        if _is_stopped(worker):
            return f"was stopped (by a signal or a debugger) and {made_none}"
        if self._is_silent(polled, now) and not self.can_reach(worker):
            return f"{no_answer}, and its host cannot be reached: its power or its network failed"
        if not is_timed or not self._is_overdue(polled, now):
            return None
        if not self._is_silent(polled, now):
            return f"{made_none}, while others waited"
        return f"{no_answer}: stopped, or in a call into C that holds the interpreter"

    def can_reach(self, worker: WorkerHandle) -> bool:
        """Whether the host of `worker` answers; the answer is kept for all workers of a node."""
        now = time.monotonic()
        until, answers = self._reachable_nodes.get(worker.node, (0.0, True))
        if now > until:
            answers = is_node_reachable(worker.node)
            self._reachable_nodes[worker.node] = time.monotonic() + _ASK_HOST_EVERY_S, answers
        return answers

    def _is_overdue(self, polled: PolledStatus, now: float) -> bool:
        is_first = polled.latest is None or not polled.latest.is_warm
        return not is_first or polled.without_step_for(now) > self._limit_s * _FIRST_STEP_FACTOR

    def _end_worker(self, worker: WorkerHandle, polled: PolledStatus, fault: str) -> None:
        self.verdicts[worker] = fault
        stack = "" if polled.latest is None else f"; its stack:\n{polled.latest.stack}"
        _log.error("%s %s: it is ended%s", worker, fault, stack)
        kill_worker(worker, self._workers.members)


def _is_stopped(worker: WorkerHandle) -> bool:
    return process_state(worker) in ("T", "t")
