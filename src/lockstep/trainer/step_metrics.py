# SPDX-License-Identifier: Apache-2.0
"""`StepMetrics`: merges metrics of single steps over workers, for callbacks with an `every`."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.keys import BATCH_COUNT
from lockstep.metrics import merge
from lockstep.trainer.argument_checks import require, require_count
from lockstep.trainer.callbacks import Callback
from lockstep.trainer.record_listener import ON_LOAD, RecordListener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.metrics.step_log import StepRow
    from lockstep.trainer.callback_list import CallbackList
    from lockstep.worker import Report, WorkerSpec

_log = logging.getLogger("lockstep")


class StepMetrics:
    """Merges rows of all workers, and calls each callback once for every step that it asks for.

    A step that is computed again after a failure is not reported again.

    Args:
        callbacks: all callbacks; those with an `every` get the metrics of steps.

    Attributes:
        every: steps for each row of the workers; 0 if no callback asks for steps.
        written: the latest step of the run that was reported to callbacks.
        loaded: the step of the state that was loaded last; 0: the run began anew.
    """

    def __init__(self, callbacks: CallbackList) -> None:
        self._callbacks = callbacks
        listening = callbacks.overriding(Callback.on_step)
        for each in listening:
            _require_every(each)
            require_count("every", each.every, optional=True)
        self._listeners = [each for each in listening if each.every is not None]
        self.every = math.gcd(*(each.every or 0 for each in self._listeners))
        self.loaded = 0
        self._restart_at(0)

    def adjust_spec(self, spec: WorkerSpec) -> WorkerSpec:
        """`spec` with the rows that the callbacks ask for."""
        return replace(spec, log_every=self.every, records_steps=bool(self._record_listeners))

    @property
    def _record_listeners(self) -> list[RecordListener]:
        return [each for each in self._listeners if isinstance(each, RecordListener)]

    def restart_at(self, step: int) -> None:
        """Restart at `step`, after a state was loaded."""
        self.loaded = step
        self._restart_at(step)
        self.note_change(ON_LOAD)

    def _restart_at(self, step: int) -> None:
        self.written = step
        self._gathered: dict[Callback, list[dict[str, Any]]] = {
            each: [] for each in self._listeners
        }

    def note_change(self, what: str) -> None:
        """Note that something else than training may have changed the state of the run."""
        for each in self._record_listeners:
            each.on_change(self.written, what)

    def take_live_rows(self, rows: Sequence[tuple[int, Sequence[StepRow]]]) -> None:
        """Take rows while a call runs, up to the last step of which all workers have theirs.

        Args:
            rows: for each worker the step up to which it has all rows, and those after `written`.
        """
        reached = min((latest for latest, _ in rows), default=0)
        self._take([row for _, own in rows for row in own if row.step <= reached])

    def finish(self, reports: Sequence[Report]) -> None:
        """Take the remaining rows at the end of a call."""
        self._take([row for report in reports for row in report.rows])
        has_none = all(report.sums[BATCH_COUNT] == 0 for report in reports)
        if len(self._listeners) > len(self._record_listeners) and has_none:
            _log.warning(
                "callbacks ask for the metrics of every %d steps, and the operator's own"
                " train_epoch has told of none: override train_batch instead, or call"
                " super().train_epoch(iterator, info)",
                self.every,
            )

    def _take(self, rows: Sequence[StepRow]) -> None:
        for step in sorted({row.step for row in rows if row.step > self.written}):
            found = [row for row in rows if row.step == step]
            self.written = step
            for callback, gathered in self._gathered.items():
                gathered.append(_join_workers([row.sums for row in found]))
                if step % (callback.every or 1) == 0:
                    metrics = _mean_over_steps(gathered)
                    gathered.clear()
                    if isinstance(callback, RecordListener):
                        callback.on_record(step, metrics, [row.record for row in found])
                    elif metrics:
                        metrics["epoch"] = max(row.epoch for row in found)
                        self._callbacks.tell(callback, Callback.on_step, step, metrics)


def _require_every(callback: Callback) -> None:
    """Refuse an `on_step` that would never be called, unless ``every = None`` says so."""
    classes = type(callback).__mro__
    own = [vars(callback), *(vars(each) for each in classes[: classes.index(Callback)])]
    require(
        any("every" in held for held in own),
        f"{type(callback).__name__}.every",
        None,
        "an int: `on_step` is called each so many steps",
        fix="every = 1 in the class",
    )


def _join_workers(sums: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the sums of workers for the same global batches."""
    return {"sums": sums, BATCH_COUNT: max(each[BATCH_COUNT] for each in sums)}


def _mean_over_steps(gathered: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over all samples of several steps; empty without metrics."""
    merged = merge([each for row in gathered for each in row["sums"]])
    names = {name for row in gathered for each in row["sums"] for name in each["sums"]}
    if not names:
        return {}
    kept = {name: value for name, value in merged.items() if not name.startswith("last_")}
    kept.update({name: merged[name] for name in names})
    return {**kept, BATCH_COUNT: sum(row[BATCH_COUNT] for row in gathered)}
