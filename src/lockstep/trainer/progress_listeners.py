# SPDX-License-Identifier: Apache-2.0
"""`ProgressListeners`: calls callbacks with the progress of a running call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from lockstep.trainer.callbacks import Callback
from lockstep.worker import ProgressReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.engine_protocol import OnProgress
    from lockstep.trainer.callback_list import CallbackList
    from lockstep.trainer.step_metrics import StepMetrics
    from lockstep.worker import Report

_TELL_EVERY_S: Final = 1.0


class ProgressListeners:
    """Calls callbacks with one call's progress, and with its steps.

    No exception of a callback may leave `on_progress`: an error in the driver would interrupt
    workers in the middle of a step. The first error is kept and raised at the end of the call.

    Args:
        callbacks: the trainer's callbacks.
        purpose: "train" or "validation".
        steps: merges metrics of single steps.
    """

    def __init__(self, callbacks: CallbackList, purpose: str, steps: StepMetrics) -> None:
        self._callbacks = callbacks
        self._listeners = callbacks.overriding(Callback.on_progress)
        self._steps = steps
        self._purpose = purpose
        self._began = self._told_at = time.monotonic()
        self._error: Exception | None = None
        self._tell(ProgressReport())

    @property
    def has_listeners(self) -> bool:
        """Whether a callback listens to this call's progress or steps."""
        return bool(self._listeners) or (self._purpose == "train" and self._steps.every > 0)

    def on_progress(self, progress: ProgressReport) -> int:
        """See `OnProgress`."""
        if progress.rows is not None and self._error is None:
            try:
                self._steps.take_live_rows(progress.rows)
            except Exception as error:
                self._error = error
        now = time.monotonic()
        if progress.steps and now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._tell(progress)
        return self._steps.written

    def _tell(self, progress: ProgressReport) -> None:
        if self._error is not None:
            return
        told: dict[str, Any] = {
            "phase": self._purpose,
            "seconds": time.monotonic() - self._began,
            "steps": progress.steps,
            "samples": progress.samples,
            "loss": progress.loss,
        }
        if progress.workers is not None:
            told |= {"workers": progress.workers, "recoveries": progress.recoveries}
        try:
            for callback in self._listeners:
                self._callbacks.tell(callback, Callback.on_progress, dict(told))
        except Exception as error:
            self._error = error

    def finish(self, reports: Sequence[Report]) -> None:
        """Report the remaining steps, and raise the first error of a callback."""
        if not self.has_listeners:
            return
        if self._error is None and self._purpose == "train":
            self._steps.finish(reports)
        if self._error is not None:
            raise self._error


def combine_listeners(*listeners: OnProgress | None) -> OnProgress | None:
    """One function that calls all `listeners` that are not None; None if there are none."""
    there = [each for each in listeners if each is not None]

    def tell_all(progress: ProgressReport) -> int:
        return max(each(progress) for each in there)

    return tell_all if there else None
