# SPDX-License-Identifier: Apache-2.0
"""What Ray reports of calls and actors that fail: whether, why, and Ctrl-C as Python names it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray.exceptions import RayActorError

    from lockstep.worker import Outcome
    from ray import ObjectRef


@contextmanager
def reraise_keyboard_interrupt() -> Iterator[None]:
    """Around waiting for Ray: Python reports a Ctrl-C in its compiled code as a SystemError.

    Code that ends the workers, and the user's program, would take it for any other exception.
    """
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise


def has_failed(ref: ObjectRef[Outcome]) -> bool:
    """Whether a call has ended with an error, or its actor has died; waits for its end."""
    try:
        outcome = ray.get(ref)
    # Whatever ended the actor or its call: the cause is told where the call is waited for.
    except Exception:
        return True
    return outcome.error is not None


def death_reason(death: RayActorError) -> str:
    """What Ray knows of a death, in a line: without the actor's ids, and without advice.

    Ray tells the reason after a sentence that is always the same, and the ids; in the first moments
    it has not heard of one.
    """
    lines = [line for line in str(death).splitlines() if line.strip()]
    told = [line.strip() for line in lines if not line.startswith("\t")]
    has_ids = len(told) < len(lines)
    reason = " ".join(told[1:] if has_ids and told[1:] else told[:3])
    return reason.split(" Some common causes include", maxsplit=1)[0]
