# SPDX-License-Identifier: Apache-2.0
"""Loggers that write rows to a file: CSV for spreadsheets and pandas, or JSON lines.

A program that is killed has mostly written rows behind its last checkpoint. The program that goes
on from there computes those steps again, so before its first row of training it moves those that
it supersedes out of the file. It does not delete them: the state may be another run's, and the
rows, too.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError
from lockstep.integrations.loggers.base import Logger, Row

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from lockstep.trainer import TorchTrainer

_LEADING_COLUMNS: Final = ("time", "phase", "step", "epoch")
_VALIDATION: Final = "validation"

_log = logging.getLogger("lockstep")


class _FileLogger(Logger):
    """Appends rows to a file.

    Args:
        path: the path of the file, whose folder is created.
        every: see `Logger`.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__(every)
        self.path = Path(path)
        self._has_trained = False

    def on_start(self, trainer: TorchTrainer) -> None:
        super().on_start(trainer)
        _check_writable(self.path)
        _end_torn_line(self.path)
        self._has_trained = False

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        # Only now: a program may load a state after it has made its trainer, and not train at all.
        if row.phase != _VALIDATION and not self._has_trained:
            self._has_trained = True
            if trainer._steps.loaded > 0 and self.path.is_file():  # and not, say, /dev/stdout
                self._move_superseded(trainer._steps.loaded)
        self._append(row)

    def _move_superseded(self, loaded: int) -> None:
        """Move the rows behind the step that was loaded, with which the run goes on."""
        with self.path.open(newline="") as file:
            rows = self._read(file)
        first, last = _superseded([self._place_of(row) for row in rows], loaded)
        if first == last:
            return
        moved_to = self.path.with_name(f"{self.path.name}.superseded")
        with moved_to.open("a", newline="") as file:
            self._dump(file, rows[first:last])
        self._replace(rows[:first] + rows[last:])
        _log.info(
            "%s: %d rows behind step %d, from which the run goes on, are in %s",
            self.path,
            last - first,
            loaded,
            moved_to,
        )

    def _replace(self, rows: Sequence[Any]) -> None:
        # The new file replaces the old one when it is complete: a kill before that loses no row.
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("w", newline="") as file:
            self._dump(file, rows)
        new.replace(self.path)

    @abstractmethod
    def _append(self, row: Row) -> None: ...

    @abstractmethod
    def _read(self, file: IO[str]) -> list[Any]:
        """The rows of the file, in a form of its own."""

    @abstractmethod
    def _dump(self, file: IO[str], rows: Sequence[Any]) -> None:
        """Write such rows."""

    @abstractmethod
    def _place_of(self, row: Any) -> tuple[str, int] | None:
        """The phase and the step of such a row; None for one that cannot be read."""


class CSVLogger(_FileLogger):
    """One row for each `train` and `validate`: time, phase, step, epoch, then the metrics.

    An existing file is appended to; a run that goes on from a checkpoint first moves the rows of
    later steps, which it computes again, to ``<path>.superseded``. A metric that is first reported
    later gets a column of its own, which is empty in the earlier rows. A metric with the name of
    one of the first four columns has the column ``metric/<name>``.

    Args:
        path: the path of the file, whose folder is created.
        every: see `Logger`.

    Raises:
        ConfigurationError: the file was not written by a `CSVLogger`, or cannot be written; raised
            before training.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__(path, every=every)
        self._columns: list[str] = []

    def on_start(self, trainer: TorchTrainer) -> None:
        super().on_start(trainer)
        # Since an earlier trainer the file may have been deleted: then it has no columns.
        self._columns = []
        if self.path.stat().st_size:
            with self.path.open(newline="") as file:
                self._columns = next(csv.reader(file), [])
            if tuple(self._columns[: len(_LEADING_COLUMNS)]) != _LEADING_COLUMNS:
                raise ConfigurationError(
                    "this file is not one of CSVLogger's",
                    where=str(self.path),
                    expected=f"a first line that begins with {','.join(_LEADING_COLUMNS)}",
                    got=f"{','.join(self._columns):.60}",
                    fix="another path",
                )

    def _append(self, row: Row) -> None:
        cells = _cells_of(row)
        new = [name for name in cells if name not in self._columns]
        if new:
            self._add_columns([*self._columns, *new])
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(cells)

    def _add_columns(self, columns: list[str]) -> None:
        with self.path.open(newline="") as file:
            rows = self._read(file)
        self._columns = columns
        self._replace(rows)

    def _read(self, file: IO[str]) -> list[Any]:
        return list(csv.DictReader(file))

    def _dump(self, file: IO[str], rows: Sequence[Any]) -> None:
        writer = csv.DictWriter(file, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)

    def _place_of(self, row: Any) -> tuple[str, int] | None:
        return _place_in(row)


class JSONLinesLogger(_FileLogger):
    """One line with a JSON object for each `train` and `validate`, with the keys of `CSVLogger`.

    An existing file is continued as by `CSVLogger`.

    Numbers that JSON does not have are strings: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.

    Args:
        path: the path of the file, whose folder is created.
        every: see `Logger`.

    Raises:
        ConfigurationError: the file cannot be written; before training.
    """

    def _append(self, row: Row) -> None:
        values = {name: _as_json(value) for name, value in row.values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(_cells_of(replace(row, values=values)), allow_nan=False) + "\n")

    def _read(self, file: IO[str]) -> list[Any]:
        return list(file)

    def _dump(self, file: IO[str], rows: Sequence[Any]) -> None:
        file.writelines(rows)

    def _place_of(self, row: Any) -> tuple[str, int] | None:
        try:
            return _place_in(json.loads(row))
        except ValueError:
            return None


def _superseded(places: Sequence[tuple[str, int] | None], loaded: int) -> tuple[int, int]:
    """The rows that an earlier program wrote behind `loaded`: from which one, and up to which.

    Args:
        places: of all rows; None for one that a kill has cut off.
        loaded: the step that this program goes on from, and may have validated at.
    """
    last, later = len(places), math.inf
    while last and places[last - 1] == (_VALIDATION, loaded):
        last -= 1
    first = last
    while first:
        place = places[first - 1]
        if place is not None:
            # A row of a later step in front of it is of a run that ended before this one began.
            if not loaded < place[1] <= later:
                break
            later = place[1]
        first -= 1
    return first, last


def _place_in(row: Any) -> tuple[str, int] | None:
    try:
        return row["phase"], int(row["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before training and not after its first epoch."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigurationError(
            "the log file cannot be written", where=str(path), got=str(error), fix="another path"
        ) from error


def _end_torn_line(path: Path) -> None:
    """Begin a new line where a killed program has left half of one."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        if file.seek(0, io.SEEK_END):
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _cells_of(row: Row) -> dict[str, Any]:
    """A row's cells by column; no metric stands in a leading column, whatever its name."""
    leading = (row.time, row.phase, row.step, row.epoch)
    cells: dict[str, Any] = dict(zip(_LEADING_COLUMNS, leading, strict=True))
    for name, value in row.values.items():
        cells[f"metric/{name}" if name in _LEADING_COLUMNS else name] = value
    return cells


def _as_json(value: float | str) -> float | str:
    if isinstance(value, str) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
