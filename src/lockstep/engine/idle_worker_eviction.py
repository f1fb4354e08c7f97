# SPDX-License-Identifier: Apache-2.0
"""Ends workers that idle since an interrupted call when another trainer needs their resources.

When Ctrl-C or an error of the operator interrupts a call, the error arrives at once and the workers
live on. The interrupted step is rolled back at the next call. If another trainer needs their
resources first, the idle workers are ended instead.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

from lockstep.error_texts import first_line
from lockstep.errors import TrainerClosedError


class InterruptibleEngine(Protocol):
    """An engine whose workers outlive an interrupted call."""

    interrupted_by: BaseException | None

    def evict_workers(self) -> None:
        """End the workers if no call has come since the interrupted one."""


_engines: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def register_for_eviction(engine: InterruptibleEngine) -> None:
    """Allow other trainers to evict the engine's workers until its call is undone."""
    _engines.add(engine)


def evict_idle_workers() -> None:
    """End the workers of interrupted calls that no later call has undone.

    When a notebook cell is run again, the old trainer is garbage-collected only after its name is
    bound to the new one.
    """
    for engine in list(_engines):
        if engine.interrupted_by is not None:
            engine.evict_workers()
    _engines.clear()


def evicted_error(cause: BaseException) -> TrainerClosedError:
    """The error for calls of a trainer whose workers, interrupted by `cause`, were evicted."""
    error = TrainerClosedError(
        "another TorchTrainer needed the room of these workers, which were idle since"
        f" {type(cause).__name__}: {first_line(cause)}",
        fix="call save() or get_model() before the other trainer is made, or give both fewer"
        " workers; load(path) in a new TorchTrainer goes on from a checkpoint",
    )
    error.__cause__ = cause
    return error
