# SPDX-License-Identifier: Apache-2.0
"""Who hears how a call gets on while it runs: the progress bar, and callbacks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from lockstep.trainer.call_errors import tell
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.trainer import TorchTrainer
    from lockstep.trainer.step_metrics import StepMetrics
    from lockstep.worker import Report

_TELL_EVERY_S: Final = 1.0


class CallListeners:
    """Tells callbacks of one call.

    Nothing it is told to do may raise here: what is raised while workers are in the middle of a
    step ends them. The first error is kept for the end of the call.
    """

    def __init__(
        self,
        trainer: TorchTrainer,
        listeners: Sequence[Callback],
        phase: str,
        steps: StepMetrics,
    ) -> None:
        self._trainer = trainer
        self._listeners = listeners
        self._steps = steps
        self._phase = phase
        self._began = self._told_at = time.monotonic()
        self._error: Exception | None = None
        self._tell({"steps": 0, "samples": 0, "loss": None})

    def watch(self, progress: dict[str, Any]) -> int:
        """Rank 0 says how far it is; returns up to which step callbacks know all rows."""
        rows = progress.pop("rows", None)
        if rows is not None and self._error is None:
            try:
                self._steps.live(rows, self._tell_of_step)
            except Exception as error:
                self._error = error
        now = time.monotonic()
        if progress.get("steps") and now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._tell(progress)
        return self._steps.written

    def _tell_of_step(self, callback: Callback, step: int, metrics: dict[str, Any]) -> None:
        tell(callback, "on_step", self._trainer, step, metrics)

    def _tell(self, progress: dict[str, Any]) -> None:
        if self._error is not None:
            return
        told = {"phase": self._phase, "seconds": time.monotonic() - self._began, **progress}
        try:
            for callback in self._listeners:
                tell(callback, "on_progress", self._trainer, dict(told))
        except Exception as error:
            self._error = error

    def finish(self, reports: Sequence[Report]) -> None:
        """Tell of the steps that are left, and raise what a callback raised meanwhile."""
        if self._error is None and self._phase == "train":
            self._steps.finish(reports, self._tell_of_step)
        if self._error is not None:
            raise self._error


def announcer_for(
    trainer: TorchTrainer, callbacks: Sequence[Callback], phase: str, steps: StepMetrics
) -> CallListeners | None:
    """Who tells callbacks of a call; None if no callback wants to know."""
    listeners = [each for each in callbacks if _listens(each)]
    wants_steps = phase == "train" and steps.every
    return CallListeners(trainer, listeners, phase, steps) if listeners or wants_steps else None


def _listens(callback: Callback) -> bool:
    return getattr(callback.on_progress, "__func__", None) is not Callback.on_progress


def all_of(
    *watches: Callable[[dict[str, Any]], int] | None,
) -> Callable[[dict[str, Any]], int] | None:
    """One function for those that are there; None if there are none."""
    there = [watch for watch in watches if watch is not None]

    def every(progress: dict[str, Any]) -> int:
        return max(watch(dict(progress)) for watch in there)

    return every if there else None
