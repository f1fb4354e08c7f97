# SPDX-License-Identifier: Apache-2.0
"""From the measured rounds of a row to its verdict.

A row compares two contenders by the *median of the ratios of neighbouring runs*, not by the ratio
of the medians: what slows the machine down for a while slows both members of a pair down, and
cancels. The spread is half the distance between the quartiles of those ratios, so a single
disturbed round moves neither. A goal is missed only beyond the spread.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """What a row came to.

    Attributes:
        ours: one value a round, in `unit`; smaller is better.
        theirs: the neighbouring values of the other contender; empty for a row with no other.
        goal: for the ratio ours / theirs, or without `theirs` for the value itself, in `unit`.
        busiest: the largest part of the machine's processors that something else used just before
            a round, 0 to 1.
        quiet: whether that stayed under the limit.
    """

    name: str
    against: str
    unit: str
    goal: float
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    busiest: float
    quiet: bool

    @property
    def samples(self) -> tuple[float, ...]:
        """What is held against the goal, one number a round."""
        if not self.theirs:
            return self.ours
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def result(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def reached(self) -> bool:
        return self.result - self.spread <= self.goal

    def as_json(self) -> dict[str, Any]:
        derived = {"result": self.result, "spread": self.spread, "reached": self.reached}
        return asdict(self) | derived


def markdown(rows: list[Measured]) -> str:
    """The table that the documentation shows."""
    lines = [
        "| work | against | ours | theirs | result | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    busy = [row for row in rows if not row.quiet]
    lines += [
        f"\n`{row.name}`: the machine was not quiet, {row.busiest:.0%} of it in use beforehand."
        for row in busy
    ]
    return "\n".join(lines)


def _line(row: Measured) -> str:
    ours = f"{statistics.median(row.ours):.3g} {row.unit}"
    theirs = f"{statistics.median(row.theirs):.3g} {row.unit}" if row.theirs else "-"
    unit = "" if row.theirs else f" {row.unit}"
    result = f"{row.result:.3g} ± {row.spread:.2g}{unit}"
    verdict = "reached" if row.reached else "**missed**"
    cells = (row.name, row.against, ours, theirs, result, f"≤ {row.goal:g}{unit}", verdict)
    return f"| {' | '.join(cells)} |"
