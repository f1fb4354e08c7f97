# SPDX-License-Identifier: Apache-2.0
"""`ProgressListeners`: passes the progress of a running call on to callbacks and a bar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from lockstep.trainer.callbacks import Callback
from lockstep.worker import ProgressReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.trainer.callback_list import CallbackList
    from lockstep.trainer.progress_bar import ProgressBar
    from lockstep.trainer.shadow_summary import ShadowSummary
    from lockstep.trainer.step_metrics import StepMetrics
    from lockstep.worker import Report

_TELL_EVERY_S: Final = 1.0


class ProgressListeners:
    """Passes one call's progress on to callbacks and a progress bar; a `CallListener`.

    No exception of a callback may leave `on_progress`: an error in the driver would interrupt
    workers in the middle of a step. The first error is kept and raised at the end of the call.

    Args:
        callbacks: the trainer's callbacks.
        purpose: "train" or "validation".
        steps: merges metrics of single steps.
        bar: the progress bar of the call, if there is one.
        shadow: gathers the shards of which workers have computed different bits, if they compare.
    """

    def __init__(
        self,
        callbacks: CallbackList,
        purpose: str,
        steps: StepMetrics,
        bar: ProgressBar | None,
        shadow: ShadowSummary | None,
    ) -> None:
        self._callbacks = callbacks
        self._listeners = callbacks.overriding(Callback.on_progress)
        self._steps = steps
        self._bar = bar
        self._shadow = shadow
        self._purpose = purpose
        self._group: dict[str, int] = {}
        self._began = self._told_at = time.monotonic()
        self._error: Exception | None = None
        self._tell(ProgressReport())

    @property
    def has_listeners(self) -> bool:
        """Whether a callback, the bar or the shadow listens to this call's progress or steps."""
        wants_steps = self._steps.every > 0 or self._shadow is not None
        is_training = self._purpose == "train"
        return bool(self._listeners) or (is_training and wants_steps) or self._bar is not None

    @property
    def rows_known(self) -> int:
        return self._steps.written

    def on_attempt(self, workers: int, recoveries: int) -> None:
        self._group = {"workers": workers, "recoveries": recoveries}

    def on_progress(self, progress: ProgressReport) -> None:
        if self._bar is not None:
            self._bar.show(progress)
        if self._shadow is not None:
            self._shadow.take(progress.wrong_shards)
        if progress.rows is not None and self._error is None:
            try:
                self._steps.take_live_rows(progress.rows)
            except Exception as error:
                self._error = error
        now = time.monotonic()
        if progress.steps and now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._tell(progress)

    def _tell(self, progress: ProgressReport) -> None:
        if self._error is not None:
            return
        told: dict[str, Any] = {
            "phase": self._purpose,
            "seconds": time.monotonic() - self._began,
            "steps": progress.steps,
            "samples": progress.samples,
            "loss": progress.loss,
            **self._group,
        }
        try:
            for callback in self._listeners:
                self._callbacks.tell(callback, Callback.on_progress, dict(told))
        except Exception as error:
            self._error = error

    def finish(self, reports: Sequence[Report]) -> None:
        """Report the remaining steps, and raise the first error of a callback."""
        if self._error is None and self._purpose == "train":
            self._steps.finish(reports)
        if self._error is not None:
            raise self._error
