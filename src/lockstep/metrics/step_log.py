# SPDX-License-Identifier: Apache-2.0
"""Sums a worker's metrics over every few steps, for the driver to log them during a call."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.metrics.average_meters import AverageMeterCollection
from lockstep.metrics.metric_values import as_number, read_numbers
from lockstep.weight_hashes import read_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lockstep.weight_hashes import PartHash, UnreadHash


@dataclass(frozen=True)
class StepRecord:
    """What one worker knows of a step, to compare it with the same step computed again.

    Attributes:
        epoch: the pass over the data, from 0.
        index: the number of the global batch in it, from 0.
        rates: the learning rates that its optimizers stepped with, of all parameter groups.
        losses: the loss of each of the worker's shards, by shard; the default loop's.
        weights: hashes of some parts of the weights after the step; rank 0's.
    """

    epoch: int
    index: int
    rates: Sequence[float]
    losses: Mapping[int, float]
    weights: Sequence[PartHash]


@dataclass
class _OpenRecord:
    """A `StepRecord` with numbers that may still be on a device."""

    epoch: int = 0
    index: int = 0
    rates: list[Any] = field(default_factory=list)
    losses: dict[int, Any] = field(default_factory=dict)
    weights: Sequence[UnreadHash] = ()

    def read(self) -> StepRecord:
        losses = dict(zip(self.losses, read_numbers([*self.losses.values()]), strict=True))
        rates = read_numbers(self.rates)
        return StepRecord(self.epoch, self.index, rates, losses, read_hashes(self.weights))


@dataclass(frozen=True)
class StepRow:
    """The sums of one worker over the steps up to `step`, from the previous row on.

    Attributes:
        step: number of steps since the run began; a multiple of the log's `every`.
        epoch: number of passes over the data that have begun.
        sums: see `AverageMeterCollection.state`.
        record: of step `step`; None unless the trainer asks for records.
    """

    step: int
    epoch: int
    sums: dict[str, Any]
    record: StepRecord | None = None


@dataclass
class _Step:
    """A step, and what was reported of it."""

    number: int = 0
    epoch: int = 0
    reports: list[tuple[Mapping[str, Any], float, Mapping[str, float]]] = field(
        default_factory=list
    )
    record: _OpenRecord = field(default_factory=_OpenRecord)


@dataclass(frozen=True)
class _CallStart:
    """What a log held when a call began, which may be undone as a whole.

    Attributes:
        step: number of steps since the run began.
        latest: the latest step in `row`.
        row: the open row.
        undoable: the steps after `latest`.
    """

    step: int
    latest: int
    row: AverageMeterCollection
    undoable: Sequence[_Step]


class StepLog:
    """Rows of `every` steps each; a step enters a row when it can no longer be undone.

    A row ends with a step that `every` divides, counted from the beginning of the run: after a
    recovery, and in a run that resumes from a checkpoint, rows end with the same steps. Only
    `rows_after` may be called from another thread.

    The way of a metric: `add` stores it with the batch on which the worker computes; `commit` moves
    it to that batch's step; and when the step can no longer be undone, `commit` adds it to a row.

    Args:
        every: the steps of a row.
        hash_weights: hashes parts of the weights after a step with the given number; None for rows
            without records.
    """

    def __init__(
        self, every: int, hash_weights: Callable[[int], Sequence[UnreadHash]] | None = None
    ) -> None:
        self._every = every
        self._hash_weights = hash_weights
        self._current = _Step()
        self._undoable: list[_Step] = []
        self._open_row = AverageMeterCollection()
        self._latest = 0
        self._call: _CallStart | None = None
        self._lock = threading.Lock()
        self._rows: list[tuple[_Step, AverageMeterCollection]] = []

    def add(self, metrics: Mapping[str, Any], n: float, partial: Mapping[str, float]) -> None:
        """Store the metrics of the current batch; see `AverageMeterCollection.update`."""
        # Numbers are read now: the program may write to a tensor before the step enters a row.
        numbers = {key: as_number(value) for key, value in metrics.items()}
        known = {key: number for key, number in numbers.items() if number is not None}
        self._current.reports.append(({**metrics, **known}, n, dict(partial)))

    def note_loss(self, shard: int, loss: Any) -> None:
        """Store the loss of one shard of the current batch, if it is a number."""
        if self._hash_weights is not None and (number := as_number(loss)) is not None:
            self._current.record.losses[shard] = number

    def note_rates(self, rates: Iterable[Any]) -> None:
        """Store the learning rates that an optimizer has stepped with, of groups that have one."""
        if self._hash_weights is not None:
            numbers = [as_number(rate) for rate in rates]
            self._current.record.rates += [each for each in numbers if each is not None]

    def commit(self, step: int, epoch: int, place: tuple[int, int], *, is_settled: bool) -> None:
        """End the current batch as step number `step`, which may be undone unless `is_settled`.

        Args:
            epoch: number of passes over the data that have begun.
            place: the batch's pass, from 0, and its number in it.
        """
        ended, self._current = self._current, _Step()
        ended.number, ended.epoch = step, epoch
        if self._hash_weights is not None:
            ended.record.epoch, ended.record.index = place
            ended.record.weights = self._hash_weights(step)
        self._undoable.append(ended)
        if not is_settled:
            return
        unsettled, self._undoable = self._undoable, []
        for each in unsettled:
            for metrics, n, partial in each.reports:
                self._open_row.update(metrics, n=n, partial=partial)
            with self._lock:
                self._latest = each.number
                if each.number % self._every == 0:
                    self._rows.append((each, self._open_row))
                    self._open_row = AverageMeterCollection()

    def rewind_to(self, step: int) -> None:
        """Forget the steps after `step`: the run goes on from there."""
        self._current = _Step()
        call = self._call
        with self._lock:
            self._rows = [row for row in self._rows if row[0].number <= step]
            if self._latest > step:
                self._open_row, self._latest = AverageMeterCollection(), step
                if call is not None and call.latest <= step <= call.step:
                    self._open_row, self._latest = call.row.copy(), call.latest
                    self._undoable = list(call.undoable)
        self._undoable = [each for each in self._undoable if each.number <= step]

    def begin_call(self, step: int, rows_known: int) -> None:
        """At step number `step`, forget the rows up to step `rows_known`, which the driver has.

        It has no report of a call that failed: the rows of its steps stay.
        """
        self._current = _Step()
        row, undoable = self._open_row.copy(), tuple(self._undoable)
        self._call = _CallStart(step, self._latest, row, undoable)
        with self._lock:
            self._rows = [row for row in self._rows if row[0].number > rows_known]

    def rows_after(self, step: int) -> tuple[int, list[StepRow]]:
        """The latest step that is in a row, or in the open one, and the rows after `step`.

        The rows up to `step` are forgotten. Steps that may be undone are committed, and are in no
        row: a driver that went on to the latest committed step would miss theirs.
        """
        with self._lock:
            rows = self._rows = [row for row in self._rows if row[0].number > step]
            latest, rows = self._latest, list(rows)
        # Read outside the lock: finished rows do not change, and reading may wait for a device.
        has_records = self._hash_weights is not None
        return latest, [
            StepRow(
                last.number, last.epoch, meters.state(), last.record.read() if has_records else None
            )
            for last, meters in rows
        ]
