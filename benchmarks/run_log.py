# SPDX-License-Identifier: Apache-2.0
"""What a run's log costs: a step of a run that keeps one, against a run that does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs
from benchmarks.steps import MODELS

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "run_log.py"
LAUNCHES = 2
GOALS = {"large": 1.01, "transformer": None}
"""The goal was set for a step of 50 ms; on two cores this one takes 20, the transformer's 10."""


def measure_run_log(rounds: int | None) -> list[Result]:
    rows = [
        PairedRow(
            key=model,
            name=f"a step with the run's log, {MODELS[model]}, 1 worker",
            against="the same without checkpoint_dir",
            unit="ms",
            goal=goal,
        )
        for model, goal in GOALS.items()
    ]
    program = Contender("run log", (sys.executable, str(PROGRAM), *GOALS))
    return measure_pairs(rows, program, rounds=rounds, own_rounds=LAUNCHES)


FAMILY = Family(measure_run_log)
