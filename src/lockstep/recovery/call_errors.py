# SPDX-License-Identifier: Apache-2.0
"""The errors of calls in which a worker has died, and which do not go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockstep.error_texts import first_line
from lockstep.errors import WorkerDiedError

if TYPE_CHECKING:
    from lockstep.engine.pending_call import PendingCall
    from lockstep.recovery.regrouping import NewGeneration

_CALL_AGAIN: Final = "the workers are complete again, with the state from before it: call it again"


def partial_call_error(
    pending_call: PendingCall[Any], new_generation: NewGeneration
) -> BaseException:
    """The error of a call that may have happened on some workers, and is not made again."""
    name = pending_call.contract.name
    fix = (
        "the workers are complete again, with the survivors' state: look at it, and call again"
        " if that is right"
        if new_generation.restore is None
        else _CALL_AGAIN
    )
    what = f"a worker died during {name}, which may have happened on the others"
    return _died_error(what, pending_call, fix)


def lost_changes_error(name: str, pending_call: PendingCall[Any]) -> BaseException:
    """The error of a call whose effects are lost, because all went back to the state before it."""
    what = f"a worker died just after {name}, and what that has changed is lost"
    return _died_error(what, pending_call, _CALL_AGAIN)


def _died_error(what: str, pending_call: PendingCall[Any], fix: str) -> BaseException:
    cause = pending_call.cause()
    died = WorkerDiedError(what, cause=None if cause is None else first_line(cause), fix=fix)
    died.__cause__ = cause
    return died
