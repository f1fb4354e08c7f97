# SPDX-License-Identifier: Apache-2.0
"""A model in units: the time of a step and the peak of a worker, beside torch's `fully_shard`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Family, PairedRow, Row, measure, measure_pairs
from benchmarks.steps import torchrun

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = str(Path(__file__).with_name("contenders") / "units.py")
RANKS = 4
MODEL = "24 blocks in units, 30 M, Adam, 4 ranks"


def measure_units(rounds: int | None) -> list[Result]:
    step = PairedRow(
        key="step",
        name=f"one step, {MODEL}",
        against="fully_shard by hand",
        unit="ms",
        goal=1.03,
    )
    results = measure_pairs(
        [step], torchrun(PROGRAM, ranks=RANKS, name="units"), rounds=rounds or 1
    )

    def peak(other: str, against: str, goal: float | None) -> Row:
        return Row(
            name=f"peak of training, {MODEL}, against {against}",
            ours=torchrun(PROGRAM, "--side", "units", ranks=RANKS, name="units"),
            theirs=torchrun(PROGRAM, "--side", other, ranks=RANKS, name=against),
            value="peak",
            unit="MiB",
            goal=goal,
            rounds=rounds or 2,
        )

    rows = [peak("torch", "fully_shard by hand", 1.05), peak("whole", "replicate", None)]
    return [*results, *(measure(row, rounds=rounds) for row in rows)]


FAMILY = Family(measure_units)
