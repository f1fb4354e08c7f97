# SPDX-License-Identifier: Apache-2.0
"""Sums a worker's metrics over every few steps, for the driver to log them during a call."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.metrics.average_meters import AverageMeterCollection

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class StepRow:
    """The sums of one worker over the steps up to `step`, from the previous row on.

    Attributes:
        step: number of steps since the run began; a multiple of the log's `every`.
        epoch: number of passes over the data that have begun.
        sums: see `AverageMeterCollection.state`.
    """

    step: int
    epoch: int
    sums: dict[str, Any]


class StepLog:
    """Rows of `every` steps each; a step enters a row when it can no longer be undone.

    A row ends with a step that `every` divides, counted from the beginning of the run: after a
    recovery, and in a run that resumes from a checkpoint, rows end with the same steps. Only
    `rows_after` may be called from another thread.

    The way of a metric: `add` stores it with the batch on which the worker computes; `commit` moves
    it to that batch's step; and when the step can no longer be undone, `commit` adds it to a row.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._batch_reports: list[tuple[Mapping[str, Any], float, Mapping[str, float]]] = []
        self._undoable: list[tuple[int, int, list[Any]]] = []
        self._open_row = AverageMeterCollection()
        self._latest = 0
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, AverageMeterCollection]] = []

    def add(self, metrics: Mapping[str, Any], n: float, partial: Mapping[str, float]) -> None:
        """Store the metrics of the current batch; see `AverageMeterCollection.update`."""
        self._batch_reports.append((dict(metrics), n, dict(partial)))

    def commit(self, step: int, epoch: int, *, is_settled: bool) -> None:
        """End the current batch as step number `step`, which may be undone unless `is_settled`."""
        self._undoable.append((step, epoch, self._batch_reports))
        self._batch_reports = []
        if not is_settled:
            return
        unsettled, self._undoable = self._undoable, []
        for self._latest, begun, reported in unsettled:
            for metrics, n, partial in reported:
                self._open_row.update(metrics, n=n, partial=partial)
            if self._latest % self._every == 0:
                with self._lock:
                    self._rows.append((self._latest, begun, self._open_row))
                self._open_row = AverageMeterCollection()

    def rewind_to(self, step: int) -> None:
        """Forget the steps after `step`: the run goes on from there."""
        self._batch_reports = []
        self._undoable = [each for each in self._undoable if each[0] <= step]
        with self._lock:
            self._rows = [row for row in self._rows if row[0] <= step]
        if self._latest > step:
            self._open_row, self._latest = AverageMeterCollection(), step

    def begin_call(self) -> None:
        """Forget the rows of the previous call, whose report has held them."""
        self._batch_reports = []
        with self._lock:
            self._rows = []

    def rows_after(self, step: int) -> list[StepRow]:
        """The rows after `step`; the earlier ones are forgotten."""
        with self._lock:
            rows = self._rows = [row for row in self._rows if row[0] > step]
            rows = list(rows)
        # Read outside the lock: finished rows do not change, and reading may wait for a device.
        return [StepRow(last, begun, meters.state()) for last, begun, meters in rows]
