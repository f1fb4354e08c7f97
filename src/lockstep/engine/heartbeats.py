# SPDX-License-Identifier: Apache-2.0
"""What each worker was doing when it answered last, asked while it performs something."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ray.exceptions import RayActorError

import ray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import WorkerStatus
    from ray import ObjectRef

_ASK_EVERY_S: Final = 0.5


@dataclass
class Heartbeat:
    """What is known of one worker.

    Attributes:
        latest: what it was doing when it answered last.
        since: the moment from which on it has been at the same step.
        asked_at: when it was asked what it has not answered yet; None if it owes no answer.
        answer: what that answer comes by.
        next_at: when to ask again.
    """

    latest: WorkerStatus | None
    since: float
    asked_at: float | None = None
    answer: ObjectRef[WorkerStatus | None] | None = None
    next_at: float = 0.0

    def without_step_for(self, now: float) -> float:
        """Seconds without a step."""
        return now - self.since

    def silent_for(self, now: float) -> float:
        """Seconds without an answer."""
        return 0.0 if self.asked_at is None else now - self.asked_at


class Heartbeats:
    """Asks workers what they are doing, and never waits for an answer."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerHandle, Heartbeat] = {}

    def clear(self) -> None:
        """Another call begins: no worker has made a step in it yet."""
        self._by_worker.clear()

    def poll(self, workers: Sequence[WorkerHandle]) -> dict[WorkerHandle, Heartbeat]:
        """What is known of `workers` now; asks them again."""
        now = time.monotonic()
        for worker in workers:
            if worker.actor is None:
                continue
            heartbeat = self._by_worker.setdefault(worker, Heartbeat(None, now))
            _take_answer(heartbeat, now)
            if heartbeat.asked_at is None and now >= heartbeat.next_at:
                heartbeat.answer, heartbeat.asked_at = worker.actor.status.remote(), now
                heartbeat.next_at = now + _ASK_EVERY_S
        return {each: self._by_worker[each] for each in workers if each in self._by_worker}

    def last_seen(self, worker: WorkerHandle) -> WorkerStatus | None:
        """What `worker` was doing when it answered last."""
        return self._by_worker[worker].latest if worker in self._by_worker else None


def _take_answer(heartbeat: Heartbeat, now: float) -> None:
    if heartbeat.answer is None or not ray.wait([heartbeat.answer], timeout=0)[0]:
        return
    try:
        status = ray.get(heartbeat.answer)
    except RayActorError:
        return  # its call says why
    latest = heartbeat.latest
    if latest is None or status is None or status.steps != latest.steps:
        heartbeat.since = now
    heartbeat.latest, heartbeat.asked_at, heartbeat.answer = status, None, None
