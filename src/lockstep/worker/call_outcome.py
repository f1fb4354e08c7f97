# SPDX-License-Identifier: Apache-2.0
"""`Outcome`: the value or error of a call on a worker, in a form that can be sent.

Errors are values: Ray wraps an exception that leaves an actor in a type of its own, which loses the
traceback, and whose frames keep the broken process group alive.
"""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from lockstep.error_texts import error_text
from lockstep.errors import LockstepError, PeerLostError, WorkerFailedError
from lockstep.serialization import dumps_exception

_OWN_CODE: Final = f"{os.sep}lockstep{os.sep}"
_RAISED: Final = "raised on rank "


@dataclass(frozen=True)
class Outcome:
    """The result of a call on one worker.

    Attributes:
        value: the result, if `error` is None.
        error: the pickled exception.
        notes: the exception's notes; the last one holds the rank and the traceback there. They are
            sent apart, because a `__reduce__` of the user's own leaves them out.
        peer_lost: the error only reports that another rank went away.
    """

    value: Any = None
    error: bytes | None = None
    notes: tuple[str, ...] = ()
    peer_lost: bool = False

    def exception(self) -> BaseException | None:
        if self.error is None:
            return None
        exception: BaseException = pickle.loads(self.error)
        with suppress(Exception):
            exception.__notes__ = list(self.notes)
        return exception


def failed_outcome(rank: int, error: BaseException) -> Outcome:
    """An outcome with `error`, whose traceback is removed so that its frames can be freed."""
    trace = _users_trace(error)
    peer_lost = is_peer_lost(error)
    for link in _chain(error):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
        # Not by assignment, which a user's class may refuse (a frozen dataclass does).
        BaseException.with_traceback(link, None)
    notes = (*getattr(error, "__notes__", ()), _rank_note(rank, trace))
    return Outcome(error=_to_picklable(error, rank), notes=notes, peer_lost=peer_lost)


def _users_trace(error: BaseException) -> str | None:
    """The traceback from the first frame outside of lockstep on; None for an error of lockstep.

    Users need no frames of lockstep above their own, and no traceback for lockstep's messages.
    """
    if isinstance(error, LockstepError):
        return None
    step = error.__traceback__
    while step is not None and _OWN_CODE in step.tb_frame.f_code.co_filename:
        step = step.tb_next
    frames = error.__traceback__ if step is None else step
    return "".join(traceback.format_exception(type(error), error, frames))


def add_rank(error: BaseException, rank: int) -> None:
    """Add a note to `error` with the rank that raised it."""
    # A user's class may refuse the attribute: then the exception goes without the note.
    with suppress(Exception):
        BaseException.add_note(error, _rank_note(rank, None))


def is_of_rank(error: BaseException) -> bool:
    """Whether `error` was raised on a rank, and not by the caller of the ranks."""
    return any(note.startswith(_RAISED) for note in getattr(error, "__notes__", ()))


def _rank_note(rank: int, trace: str | None) -> str:
    note = f"{_RAISED}{rank}"
    return note if trace is None else f"{note}; its traceback there:\n{trace.rstrip()}"


def is_peer_lost(error: BaseException) -> bool:
    return any(isinstance(link, PeerLostError) for link in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    # Compared by identity: a user's exceptions may define an equality that raises.
    while link is not None and all(link is not seen for seen in chain):
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _to_picklable(error: BaseException, rank: int) -> bytes:
    instead = WorkerFailedError(
        f"a worker raised {type(error).__name__}, which cannot travel between processes",
        where=f"rank {rank}",
        got=error_text(error),
    )
    return dumps_exception(error, instead)
