# SPDX-License-Identifier: Apache-2.0
"""Whether a worker that was started is ready to take a place."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import cloudpickle
from ray.exceptions import RayActorError

import ray
from lockstep.engine.actor_failures import reason_of
from lockstep.errors import WorkerDiedError

if TYPE_CHECKING:
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import Outcome


class Readiness(Enum):
    """Of a worker that runs its `setup`."""

    STARTING = auto()
    READY = auto()
    FAILED = auto()


def look_at(member: WorkerHandle, starting: Any) -> tuple[Readiness, BaseException | None]:
    """How far `member` is, and what went wrong; never waits for its `setup`."""
    if not ray.wait([starting], timeout=0)[0]:
        return Readiness.STARTING, None
    try:
        outcome: Outcome = ray.get(starting)
        error = outcome.exception()
        if error is None and not member.pid:
            member.pid = cloudpickle.loads(outcome.value)["pid"]
            member.node = ray.get(member.actor.node.remote())
    except RayActorError as failure:
        error = WorkerDiedError(f"{member} died before it was ready", cause=reason_of(failure))
        error.__cause__ = failure
    return (Readiness.READY, None) if error is None else (Readiness.FAILED, error)
