# SPDX-License-Identifier: Apache-2.0
"""Metrics of single steps on one worker, a few steps to a row, while a call runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.metrics.average_meters import AverageMeterCollection

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class StepRow:
    """What one worker counted in the steps up to `step`, from the row before it on.

    Attributes:
        step: steps of the run; a multiple of the log's `every`.
        epoch: passes over the data begun.
        sums: see `AverageMeterCollection.state`.
    """

    step: int
    epoch: int
    sums: dict[str, Any]


class StepLog:
    """Rows of `every` steps, of steps that have happened.

    A row ends with a step that `every` divides, counted from the beginning of the run: after a
    recovery, and in a run that goes on from a checkpoint, rows end with the same steps.
    `newer_than` alone may be called from another thread.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._in_hand: list[tuple[Mapping[str, Any], float, Mapping[str, float]]] = []
        self._unsettled: list[tuple[int, int, list[Any]]] = []
        self._window = AverageMeterCollection()
        self._latest = 0
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, AverageMeterCollection]] = []

    def add(self, metrics: Mapping[str, Any], n: float, partial: Mapping[str, float]) -> None:
        """What the batch in hand reported; see `AverageMeterCollection.update`."""
        self._in_hand.append((dict(metrics), n, dict(partial)))

    def commit(self, step: int, epoch: int, *, is_settled: bool) -> None:
        """The batch in hand was step number `step`; unless `is_settled` it may be taken back."""
        self._unsettled.append((step, epoch, self._in_hand))
        self._in_hand = []
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
        """The run goes on from `step`: what came after it did not happen."""
        self._in_hand = []
        self._unsettled = [each for each in self._unsettled if each[0] <= step]
        with self._lock:
            self._rows = [row for row in self._rows if row[0] <= step]
        if self._latest > step:
            self._window, self._latest = AverageMeterCollection(), step

    def begin_call(self) -> None:
        """The rows of the call before were in its report."""
        self._in_hand = []
        with self._lock:
            self._rows = []

    def newer_than(self, step: int) -> list[StepRow]:
        """The rows after `step`; those before it are not asked for again."""
        with self._lock:
            rows = self._rows = [row for row in self._rows if row[0] > step]
            rows = list(rows)
        # A row is over, and nobody counts in it any more. On a device, reading makes a host wait.
        return [StepRow(last, begun, meters.state()) for last, begun, meters in rows]
