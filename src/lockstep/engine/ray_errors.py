# SPDX-License-Identifier: Apache-2.0
"""Reads failures of calls and actors from Ray: whether a call failed, and why an actor died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ray.exceptions import (
    ActorUnschedulableError,
    OutOfMemoryError,
    RayActorError,
    RuntimeEnvSetupError,
)

import ray

if TYPE_CHECKING:
    from ray.exceptions import RayError

    from lockstep.worker import Outcome
    from ray import ObjectRef

ACTOR_DEATHS: Final = (RayActorError, OutOfMemoryError)
"""What a call of an actor's method raises if the actor's process has ended. Ray's memory monitor
reports those that it has killed by an `OutOfMemoryError`, which is no `RayActorError`."""

ACTOR_NEVER_STARTED: Final = (ActorUnschedulableError, RuntimeEnvSetupError)
"""What a call of an actor's method raises if Ray cannot start a process for the actor."""


def has_failed(ref: ObjectRef[Outcome]) -> bool:
    """Whether a call has ended with an error, or its actor has died; blocks until the call ends."""
    try:
        outcome = ray.get(ref)
    # Any exception counts as a failure; `PendingCall` reports its cause.
    except Exception:
        return True
    return outcome.error is not None


def death_reason(death: RayError) -> str:
    """Why an actor died, in one line: Ray's message without the actor's ids and Ray's advice.

    Ray's message has a fixed sentence, then the ids, then the reason; the reason is missing in the
    first moments after the death.
    """
    lines = [line for line in str(death).splitlines() if line.strip()]
    told = [line.strip() for line in lines if not line.startswith("\t")]
    has_ids = len(told) < len(lines)
    reason = " ".join(told[1:] if has_ids and told[1:] else told[:3])
    return reason.split(" Some common causes include", maxsplit=1)[0]
