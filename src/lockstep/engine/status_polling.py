# SPDX-License-Identifier: Apache-2.0
"""`StatusPoller`: asks each worker for its status while a call runs, and keeps the last answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import ray
from lockstep.engine.ray_errors import ACTOR_DEATHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import LoopCounts, WorkerStatus
    from ray import ObjectRef

_ASK_EVERY_S: Final = 0.5


@dataclass
class PolledStatus:
    """The last status of one worker, and the request for the next one.

    Times are those that the caller of `StatusPoller.poll` says, in seconds.

    Attributes:
        latest: the worker's last status; None before its first answer.
        since: the time at which the worker was first seen at its present step.
        asked_at: the time of the request that is not answered yet; None if none is pending.
        answer: the reference of the pending request.
        next_at: the time of the next request.
    """

    latest: WorkerStatus | None
    since: float
    asked_at: float | None = None
    answer: ObjectRef[WorkerStatus | None] | None = None
    next_at: float = 0.0

    def without_step_for(self, now: float) -> float:
        """Seconds since the worker was first seen at its present step."""
        return now - self.since

    def silent_for(self, now: float) -> float:
        """Seconds since the request that the worker has not answered."""
        return 0.0 if self.asked_at is None else now - self.asked_at


class StatusPoller:
    """Asks workers for their status, and never blocks for an answer.

    A loop goes on after a recovery, which takes several remote calls: its counts outlive them.
    """

    def __init__(self) -> None:
        self._by_worker: dict[WorkerHandle, PolledStatus] = {}
        self._counts: dict[WorkerHandle, LoopCounts] = {}

    def clear(self) -> None:
        """Forget all answers but counts: another remote call begins, and no worker has made a step
        in it."""
        self._by_worker.clear()

    def forget_counts(self) -> None:
        """Forget what workers have counted, because a loop begins, or begins again."""
        self._counts.clear()

    def poll(self, workers: Sequence[WorkerHandle], now: float) -> dict[WorkerHandle, PolledStatus]:
        """The latest status of `workers` in actors; takes new answers, and sends new requests."""
        for worker in workers:
            if worker.actor is None:
                continue
            polled = self._by_worker.setdefault(worker, PolledStatus(None, now))
            _take_answer(polled, now)
            if polled.latest is not None and polled.latest.counted is not None:
                self._counts[worker] = polled.latest.counted
            if polled.asked_at is None and now >= polled.next_at:
                polled.answer, polled.asked_at = worker.actor.status.remote(), now
                polled.next_at = now + _ASK_EVERY_S
        return {each: self._by_worker[each] for each in workers if each in self._by_worker}

    def last_seen(self, worker: WorkerHandle) -> WorkerStatus | None:
        """The last status of `worker`; None if it has not answered in this call."""
        return self._by_worker[worker].latest if worker in self._by_worker else None

    def last_counts(self, worker: WorkerHandle) -> LoopCounts | None:
        """The last counts of `worker` since `forget_counts`; None if none have arrived."""
        return self._counts.get(worker)


def _take_answer(polled: PolledStatus, now: float) -> None:
    if polled.answer is None or not ray.wait([polled.answer], timeout=0)[0]:
        return
    try:
        status = ray.get(polled.answer)
    except ACTOR_DEATHS:
        return  # the pending call reports the death
    latest = polled.latest
    if latest is None or status is None or status.steps != latest.steps:
        polled.since = now
    polled.latest, polled.asked_at, polled.answer = status, None, None
