# SPDX-License-Identifier: Apache-2.0
"""What each thread of this process is doing, in a word: said by the code that does it.

A watchdog asks from another thread whether a rank waits for its peers or computes. The code that
begins to wait, or to compute, says so here; nothing is derived from the names of files and
functions, so a rename cannot change what the watchdog does. Entering and leaving a phase appends
to and pops from a list (less than a microsecond), a few times in each step.
"""

from __future__ import annotations

import threading
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")


class Phase(Enum):
    """What a thread is doing; the value is what people read."""

    NO_THREAD = "idle"
    USER_CODE = "its own code"
    READING = "reading data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    VALIDATION = "validation"
    FORMING_GROUP = "meeting the others"
    COPYING_STATE = "copying state"
    WAITING = "waiting for the others"


# By thread: each appends to and pops from a list of its own, and others only read the last entry,
# so no lock is needed.
_entered: Final[dict[int, list[Phase]]] = {}


class in_phase:  # used as `with in_phase(...)` and `@in_phase(...)`
    """Inside, the thread is in `phase`; afterwards in the phase of before, also after an error.

    ::

        with in_phase(Phase.WAITING):
            work.wait()

    As a decorator it does the same around every call of a function.
    """

    __slots__ = ("_phase",)

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        _entered.setdefault(threading.get_ident(), []).append(self._phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread = threading.get_ident()
        phases = _entered[thread]
        phases.pop()
        if not phases:
            # Threads come and go, and the system uses their numbers again.
            del _entered[thread]

    # Not contextlib.ContextDecorator: its frame would stand in the tracebacks that users read.
    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def in_its_phase(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return in_its_phase


def phase_of(thread_id: int) -> Phase:
    """The phase that a living thread entered last and has not left. From any thread."""
    # A slice: the thread may leave its last phase between a test and an index.
    latest = _entered.get(thread_id, [])[-1:]
    return latest[0] if latest else Phase.USER_CODE
