# SPDX-License-Identifier: Apache-2.0
"""A worker's log of the metrics of its steps, in rows of a few steps, while a call runs."""

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
        step: steps of the run; a multiple of the log's `every`.
        epoch: passes over the data begun.
        sums: see `AverageMeterCollection.state`.
    """

    step: int
    epoch: int
    sums: dict[str, Any]


class StepLog:
    """Rows of `every` steps each, of steps that have happened.

    A row ends with a step that `every` divides, counted from the beginning of the run: after a
    recovery, and in a run that goes on from a checkpoint, rows end with the same steps. Only
    `newer_than` may be called from another thread.

    The way of a metric: `add` keeps it with the batch on which the worker computes; `commit` gives
    it to that batch's step; and once a step can no longer be taken back, it enters a row.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._current: list[tuple[Mapping[str, Any], float, Mapping[str, float]]] = []
        self._unsettled: list[tuple[int, int, list[Any]]] = []
        self._window = AverageMeterCollection()
        self._latest = 0
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, AverageMeterCollection]] = []

    def add(self, metrics: Mapping[str, Any], n: float, partial: Mapping[str, float]) -> None:
        """Take what the current batch reported; see `AverageMeterCollection.update`."""
        self._current.append((dict(metrics), n, dict(partial)))

    def commit(self, step: int, epoch: int, *, is_settled: bool) -> None:
        """End the current batch as step number `step`, which may be undone unless `is_settled`."""
        self._unsettled.append((step, epoch, self._current))
        self._current = []
        if not is_settled:
            return
        unsettled, self._unsettled = self._unsettled, []
        for self._latest, begun, reported in unsettled:
            for metrics, n, partial in reported:
                self._window.update(metrics, n=n, partial=partial)
            if self._latest % self._every == 0:
                with self._lock:
                    self._rows.append((self._latest, begun, self._window))
                self._window = AverageMeterCollection()

    def back_to(self, step: int) -> None:
        """Forget the steps after `step`, from which the run goes on."""
        self._current = []
        self._unsettled = [each for each in self._unsettled if each[0] <= step]
        with self._lock:
            self._rows = [row for row in self._rows if row[0] <= step]
        if self._latest > step:
            self._window, self._latest = AverageMeterCollection(), step

    def begin_call(self) -> None:
        """Forget the rows of the previous call: they were in its report."""
        self._current = []
        with self._lock:
            self._rows = []

    def newer_than(self, step: int) -> list[StepRow]:
        """The rows after `step`; the earlier ones are forgotten."""
        with self._lock:
            rows = self._rows = [row for row in self._rows if row[0] > step]
            rows = list(rows)
        # Outside the lock: no step enters a finished row, and reading may wait for a device.
        return [StepRow(last, begun, meters.state()) for last, begun, meters in rows]
