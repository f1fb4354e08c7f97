# SPDX-License-Identifier: Apache-2.0
"""What the driver sees of its workers while they perform something."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import RayActorError

import ray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import WorkerStatus

_ASK_EVERY_S: Final = 0.5


@dataclass
class Heartbeat:
    """What is known of one member.

    Attributes:
        latest: what it was doing when it answered last.
        since: the moment from which on it has been at the same step.
        asked_at: when it was asked what it has not answered yet; None if it owes no answer.
        question: what that answer comes by.
        next_at: when to ask again.
    """

    latest: WorkerStatus | None
    since: float
    asked_at: float | None = None
    question: Any = None
    next_at: float = 0.0

    def stands_for(self, now: float) -> float:
        """Seconds without a step."""
        return now - self.since

    def silent_for(self, now: float) -> float:
        """Seconds without an answer."""
        return 0.0 if self.asked_at is None else now - self.asked_at


class Heartbeats:
    """Asks, and never waits for an answer."""

    def __init__(self) -> None:
        self._seen: dict[WorkerHandle, Heartbeat] = {}

    def forget(self) -> None:
        """Another call begins: nobody has been anywhere yet."""
        self._seen.clear()

    def look(self, members: Sequence[WorkerHandle]) -> dict[WorkerHandle, Heartbeat]:
        """What is known of `members` now; asks them again."""
        now = time.monotonic()
        for member in members:
            if member.actor is None:
                continue
            seen = self._seen.setdefault(member, Heartbeat(None, now))
            self._read(seen, now)
            if seen.asked_at is None and now >= seen.next_at:
                seen.question, seen.asked_at = member.actor.where.remote(), now
                seen.next_at = now + _ASK_EVERY_S
        return {member: self._seen[member] for member in members if member in self._seen}

    def last_seen(self, member: WorkerHandle) -> WorkerStatus | None:
        """What `member` was doing when it was seen last."""
        return self._seen[member].latest if member in self._seen else None

    @staticmethod
    def _read(seen: Heartbeat, now: float) -> None:
        if seen.asked_at is None or not ray.wait([seen.question], timeout=0)[0]:
            return
        try:
            found: WorkerStatus | None = ray.get(seen.question)
        except RayActorError:
            return  # its call says why
        if seen.latest is None or found is None or found.steps != seen.latest.steps:
            seen.since = now
        seen.latest, seen.asked_at = found, None
