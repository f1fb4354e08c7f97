# SPDX-License-Identifier: Apache-2.0
"""Loggers that write rows to a file: CSV for spreadsheets and pandas, or JSON lines."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError
from lockstep.integrations.loggers.base import Logger, Row

if TYPE_CHECKING:
    import os

    from lockstep.trainer import TorchTrainer

_LEADING_COLUMNS: Final = ("time", "phase", "step", "epoch")


class CSVLogger(Logger):
    """One row for each `train` and `validate`: time, phase, step, epoch, then the metrics.

    An existing file is appended to. A metric that is first reported later gets a column of its
    own, which is empty in the earlier rows.

    Args:
        path: the path of the file, whose folder is created.
        every: see `Logger`.

    Raises:
        ConfigurationError: the file was not written by a `CSVLogger`, or cannot be written; raised
            before training.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__(every)
        self.path = Path(path)
        self._columns: list[str] = []

    def on_start(self, trainer: TorchTrainer) -> None:
        _check_writable(self.path)
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

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        cells = {**_leading_cells(row), **row.values}
        new = [name for name in cells if name not in self._columns]
        if new:
            self._add_columns([*self._columns, *new])
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(cells)

    def _add_columns(self, columns: list[str]) -> None:
        rows: list[dict[str, Any]] = []
        if self._columns:
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        # The new file replaces the old one when it is complete: a kill before that loses no row.
        wider = self.path.with_name(f"{self.path.name}.new")
        with wider.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        wider.replace(self.path)
        self._columns = columns


class JSONLinesLogger(Logger):
    """One line with a JSON object for each `train` and `validate`; an existing file is appended to.

    Numbers that JSON does not have are strings: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.

    Args:
        path: the path of the file, whose folder is created.
        every: see `Logger`.

    Raises:
        ConfigurationError: the file cannot be written; before training.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__(every)
        self.path = Path(path)

    def on_start(self, trainer: TorchTrainer) -> None:
        _check_writable(self.path)

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        values = {name: _as_json(value) for name, value in row.values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({**_leading_cells(row), **values}, allow_nan=False) + "\n")


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before training and not after its first epoch."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigurationError(
            "the log file cannot be written", where=str(path), got=str(error), fix="another path"
        ) from error


def _leading_cells(row: Row) -> dict[str, Any]:
    return dict(zip(_LEADING_COLUMNS, (row.time, row.phase, row.step, row.epoch), strict=True))


def _as_json(value: float | str) -> float | str:
    if isinstance(value, str) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
