# SPDX-License-Identifier: Apache-2.0
"""What recovery costs while nobody dies: the copies that a step may have to go back to.

The watchdog costs a step nothing: it reads stacks from another thread, and only when a call has
been silent.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "recovery_cost.py"
GOAL = 0.01
MODELS = {"large": "8 M MLP", "convnet": "convnet with batch norm"}


def measure_cost(rounds: int | None) -> list[Result]:
    rows = [
        PairedRow(
            key=key,
            name=f"what a step keeps for recovery, {title}, 2 workers",
            against="the whole step",
            unit="ms",
            goal=GOAL,
        )
        for key, title in MODELS.items()
    ]
    return measure_pairs(
        rows, Contender("recovery cost", (sys.executable, str(PROGRAM))), rounds=rounds
    )


FAMILY = Family(measure_cost, ray_cpus=4)
