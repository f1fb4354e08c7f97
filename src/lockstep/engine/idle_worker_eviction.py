# SPDX-License-Identifier: Apache-2.0
"""A call that ends in the middle, by Ctrl-C or because an operator's code failed; workers live on.

The error arrives at once. What the workers were doing is undone when the next call comes, or never:
where another trainer needs their room, they end.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

from lockstep.errors import TrainerClosedError


class InterruptibleEngine(Protocol):
    """An engine whose workers outlive an interrupted call."""

    interrupted_by: BaseException | None

    def evict_workers(self) -> None:
        """End the workers, which have not been called since their call was interrupted."""


_engines: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def register_for_eviction(engine: InterruptibleEngine) -> None:
    """The engine's workers may have to make room for those of another trainer."""
    _engines.add(engine)


def evict_idle_workers() -> None:
    """End the workers of interrupted calls that no later call has undone.

    In a notebook the trainer of before lives until the new one has taken its name.
    """
    for engine in list(_engines):
        if engine.interrupted_by is not None:
            engine.evict_workers()
    _engines.clear()


def evicted_error(cause: BaseException) -> TrainerClosedError:
    """Why the workers of a call that `cause` interrupted end when another trainer comes."""
    from lockstep.worker import error_text  # imports torch, which a launch can do without

    first_line = next(iter(error_text(cause).splitlines()), "")
    error = TrainerClosedError(
        "another TorchTrainer needed the room of these workers, which were idle since"
        f" {type(cause).__name__}: {first_line}",
        fix="call save() or get_model() before the other trainer is made, or give both fewer"
        " workers; load(path) in a new TorchTrainer goes on from a checkpoint",
    )
    error.__cause__ = cause
    return error
