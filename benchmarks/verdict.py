# SPDX-License-Identifier: Apache-2.0
"""From the measured rounds of a row to its verdict.

A row compares two contenders by the *median of the ratios of neighbouring runs*, not by the ratio
of the medians: what slows the machine down for a while slows both members of a pair down, and
cancels. The spread is half the distance between the quartiles of those ratios, so a single
disturbed round moves neither.

A goal is reached where the result and its spread lie below it, or where the 95 % interval of the
median does: many pairs pin a median down that single pairs scatter about. It is missed where they
lie above, and else the row is undecided.

A row without another contender has a goal in its own unit. It is shown as missed where it is, and
fails nothing: seconds are the machine's, ratios are ours.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


STATED = "stated"
REACHED = "reached"
MISSED = "**missed**"
UNDECIDED = "undecided"

CONFIDENCE = 0.95


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """Where the median of what was sampled lies, at `CONFIDENCE`, whatever its distribution.

    Each sample lies below the median with probability 1/2, so the number of those that do is
    binomial: the interval runs from the k-th smallest to the k-th largest sample (Conover,
    Practical Nonparametric Statistics, 3.2). Fewer than six samples bound no median so surely.

    Rejected: a bootstrap. It needs random numbers, and is too narrow with few samples.
    """
    ordered = sorted(samples)
    outside = (1 - CONFIDENCE) / 2 * 2 ** len(ordered)
    below = 0
    for skipped in range(len(ordered)):
        below += math.comb(len(ordered), skipped)
        if below > outside:
            return (ordered[skipped - 1], ordered[-skipped]) if skipped else (-math.inf, math.inf)
    return -math.inf, math.inf


@dataclass(frozen=True)
class Measured:
    """What a row came to.

    Attributes:
        ours: one value a round, in `unit`; smaller is better.
        theirs: the neighbouring values of the other contender; empty for a row with no other.
        goal: for the ratio ours / theirs, or without `theirs` for the value itself, in `unit`;
            None for a row that is only stated.
        busiest: the largest part of the machine's processors that something else used just before
            a round, 0 to 1.
        quiet: whether that stayed under the limit.
        note: a sentence for the reader, under the table.
    """

    name: str
    against: str
    unit: str
    goal: float | None
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    busiest: float
    quiet: bool
    note: str = ""

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
    def fails(self) -> bool:
        """Whether the benchmark as a whole has failed for this row."""
        return bool(self.theirs) and self.verdict == MISSED

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return STATED
        low, high = interval_of_median(self.samples)
        if min(self.result + self.spread, high) <= self.goal:
            return REACHED
        return MISSED if max(self.result - self.spread, low) > self.goal else UNDECIDED

    def as_json(self) -> dict[str, Any]:
        derived = {"result": self.result, "spread": self.spread, "verdict": self.verdict}
        return asdict(self) | derived

    def cells(self) -> tuple[str, ...]:
        ours = f"{statistics.median(self.ours):.3g} {self.unit}"
        theirs = f"{statistics.median(self.theirs):.3g} {self.unit}" if self.theirs else "-"
        unit = "" if self.theirs else f" {self.unit}"
        spread = f" ± {self.spread:.2g}" if len(self.samples) > 1 else ""
        result = f"{self.result:.3g}{spread}{unit}"
        goal = "-" if self.goal is None else f"≤ {self.goal:g}{unit}"
        return (self.name, self.against, ours, theirs, result, goal, self.verdict)

    def remarks(self) -> list[str]:
        said = [self.note] if self.note else []
        if not self.quiet:
            said.append(f"the machine was not quiet, {self.busiest:.0%} of it in use beforehand.")
        return said


@dataclass(frozen=True)
class NotMeasured:
    """A row that could not be measured here; it stands in the table all the same.

    Attributes:
        goal: as it would be shown.
        reason: instead of a verdict: "not installed", "not yet", "no second device".
        failed: it should have been measured, and its program failed.
    """

    name: str
    against: str
    goal: str
    reason: str
    failed: bool = False

    @property
    def fails(self) -> bool:
        return False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        return (self.name, self.against, "-", "-", "-", self.goal, self.reason)

    def remarks(self) -> list[str]:
        return []


Result = Measured | NotMeasured


def markdown(rows: Sequence[Result]) -> str:
    """The table that the documentation shows."""
    lines = [
        "| work | against | ours | theirs | result | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    about: dict[str, list[str]] = {}
    for row in rows:
        for said in row.remarks():
            about.setdefault(said, []).append(f"`{row.name}`")
    lines += [f"\n{', '.join(dict.fromkeys(names))}: {said}" for said, names in about.items()]
    return "\n".join(lines)
