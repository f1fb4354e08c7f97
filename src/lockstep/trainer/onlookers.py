# SPDX-License-Identifier: Apache-2.0
"""Who hears how a call gets on while it runs: the progress bar, and callbacks."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockstep.trainer import TorchTrainer

_TELL_EVERY_S: Final = 1.0


class Announcer:
    """Tells callbacks of one call.

    Nothing it is told to do may raise here: what is raised while workers are in the middle of a
    step ends them. The first error is kept for the end of the call.
    """

    def __init__(self, trainer: TorchTrainer, listeners: Sequence[Callback], phase: str) -> None:
        self._trainer = trainer
        self._listeners = listeners
        self._phase = phase
        self._began = self._told_at = time.monotonic()
        self._error: Exception | None = None
        self._tell({"steps": 0, "samples": 0, "loss": None})

    def watch(self, progress: dict[str, Any]) -> None:
        """Rank 0 says how far it is."""
        now = time.monotonic()
        if progress.get("steps") and now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._tell(progress)

    def _tell(self, progress: dict[str, Any]) -> None:
        if self._error is not None:
            return
        told = {"phase": self._phase, "seconds": time.monotonic() - self._began, **progress}
        try:
            for callback in self._listeners:
                callback.on_progress(self._trainer, dict(told))
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Raise what a callback raised meanwhile."""
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def announced(
    trainer: TorchTrainer, callbacks: Sequence[Callback], phase: str
) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """What to call with rank 0's progress inside; None if no callback wants to know."""
    listeners = [each for each in callbacks if _listens(each)]
    if not listeners:
        yield None
        return
    announcer = Announcer(trainer, listeners, phase)
    yield announcer.watch
    announcer.finish()


def _listens(callback: Callback) -> bool:
    return getattr(callback.on_progress, "__func__", None) is not Callback.on_progress


def all_of(
    *watches: Callable[[dict[str, Any]], None] | None,
) -> Callable[[dict[str, Any]], None] | None:
    """One function for those that are there; None if there are none."""
    there = [watch for watch in watches if watch is not None]

    def every(progress: dict[str, Any]) -> None:
        for watch in there:
            watch(progress)

    return every if there else None
