# SPDX-License-Identifier: Apache-2.0
"""Random programs: what they are made of, and what the audit says of one beside what is true."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tests.audit.pool import Pool

    from lockstep.audit.finding import Finding

HERE = __file__
RANKS = 2
ROUNDING = {"float64": 1e-4, "float32": 1e-3}
HALF = 1e-2


def choices(number: int) -> dict[str, Any]:
    """The choices of program `number`; the same on every machine."""
    draw = random.Random(number)
    windows = draw.choice([1, 1, 2, 3])
    count = draw.randint(3, 8)
    counts = [[count] * windows for _ in range(RANKS)]
    if draw.random() < 0.4:
        counts = [[draw.randint(2, 12) for _ in range(windows)] for _ in range(RANKS)]
    way = draw.choice(["ddp", "ddp", "ddp_half", "each", "flat", "gather", "fsdp"])
    faults: list[str | None] = [None, None, None, "again", "divided_again"]
    if way in ("each", "flat", "gather"):
        faults += ["undivided", "undivided", "broadcast"][: 2 if way == "gather" else 3]
    if way == "each":
        faults.append("one_left_out")
    if way in ("ddp", "ddp_half") and windows > 1:
        faults += ["last_unsynced", "last_unsynced"]
    weighing = draw.choice(
        ["mean", "mean_of_window", "own_sum", "global_sum", "global_sum_times_ranks"]
    )
    clips: list[str | None] = [None, None, None, "after"]
    if way in ("each", "flat", "gather"):
        clips += ["before", "value_before", "each_before"]
    return {
        "seed": number,
        "hidden": draw.randint(4, 16),
        "dtype": draw.choice(["float32", "float32", "float64"]),
        "counts": counts,
        "loss": draw.choice(["cross_entropy", "mse"]),
        "weighing": weighing,
        "factor": draw.choice([1.0, 1.0, 1.0, 1.0, 0.3, 1.0 / RANKS]),
        "way": way,
        "fault": draw.choice(faults),
        "clip": draw.choice(clips),
        "limit": draw.choice([0.05, 0.3]),
        "hook": draw.choice([None, None, None, None, 0.7]),
        "optimizer": draw.choice(["SGD", "momentum", "AdamW"]),
    }


@dataclass
class Judged:
    """One program, what is true of it and what was found."""

    choices: dict[str, Any]
    measured: list[dict[str, float]]
    findings: list[Finding]
    unseen: list[Any]

    @property
    def _rounding(self) -> float:
        return HALF if self.choices["way"] == "ddp_half" else ROUNDING[self.choices["dtype"]]

    @property
    def is_wrong(self) -> bool:
        """Is what a step used not the gradient of the global batch?"""
        return any(
            abs(step["ratio"] - 1.0) > self._rounding or step["apart"] > self._rounding
            for step in self.measured
        )

    @property
    def is_meant(self) -> bool:
        """A factor that a program may choose: no number tells that it is wrong."""
        apart = max(step["apart"] for step in self.measured)
        return self.is_wrong and apart <= self._rounding and self.choices["fault"] is None

    @property
    def alarms(self) -> list[str]:
        """Codes of findings on a right program; a clip may hide what went wrong before it."""
        if self.is_wrong or self.choices["fault"] is not None:
            return []
        return [f.code for f in self.findings if f.severity != "notice"]

    @property
    def is_found(self) -> bool:
        return bool(self.findings) or self.is_meant

    @property
    def factor_is_off(self) -> bool:
        """Does a finding name a factor that is not the measured one, within 1 %?"""
        if self.choices["clip"] is not None or self.choices["hook"] is not None:
            return False
        for finding in self.findings:
            ratio = finding.evidence.get("ratio")
            if finding.step is not None and isinstance(ratio, float):
                true = self.measured[finding.step - 1]["ratio"] / _unsaid(self, finding.code)
                if abs(ratio - true) > 0.01 * abs(ratio):
                    return True
        return False

    def __str__(self) -> str:
        told = {k: v for k, v in self.choices.items() if k not in ("hidden", "optimizer", "limit")}
        return f"{told} {self.measured[0]} {[f.code for f in self.findings]} {self.unseen}"


def _unsaid(one: Judged, code: str) -> float:
    """What the program chose itself: to add up means of micro-batches, a factor of its loss.

    LS206 is about that factor; LS204 tells what came after the average, whatever was averaged.
    """
    windows = len(one.choices["counts"][0])
    factor = 1.0 if code == "LS206" else float(one.choices["factor"])
    if code == "LS204" and one.choices["weighing"] == "global_sum":
        factor /= RANKS
    return factor * (float(windows) if one.choices["weighing"] == "mean" else 1.0)


def judged(pool: Pool, number: int, output: Path) -> Judged:
    """Run program `number` on two ranks and judge it."""
    from pathlib import Path

    made = choices(number)
    output.unlink(missing_ok=True)
    program = Path(HERE).parent / "program.py"
    ledgers = pool.ledgers(program, json.dumps(made), str(output))
    unseen = [led.facts.unseen for led in ledgers if led.facts.unseen]
    failed = [led.failure for led in ledgers if led.failure]
    assert not failed, (made, failed)
    return Judged(made, json.loads(output.read_text()), pool.judge(ledgers), unseen)
