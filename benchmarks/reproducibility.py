# SPDX-License-Identifier: Apache-2.0
"""What the same bits at every number of workers cost: `reproducible=True`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs
from benchmarks.steps import MODELS

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "reproducible.py"
LAUNCHES = 1
GOAL = 1.10


def measure_reproducible(rounds: int | None) -> list[Result]:
    rows = [
        PairedRow(
            key=key,
            name=f"a step with reproducible=True, {title}, 2 workers",
            against="the plain reduction",
            unit="ms",
            goal=GOAL,
        )
        for key, title in MODELS.items()
    ]
    program = Contender("reproducible", (sys.executable, str(PROGRAM)))
    return measure_pairs(rows, program, rounds=rounds, own_rounds=LAUNCHES)


FAMILY = Family(measure_reproducible, ray_cpus=4)
