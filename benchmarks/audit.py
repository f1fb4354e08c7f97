# SPDX-License-Identifier: Apache-2.0
"""What the audit costs: a step that is watched, against the same step that is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Contender, Family, PairedRow, Row, measure, measure_pairs
from benchmarks.steps import torchrun

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "audited.py"
SCRIPT = Path(__file__).with_name("contenders") / "language_model_script.py"
LAUNCHES = {"watch": 2, "full": 1}
"""The goals of a watch are near to what can be told apart."""

GOALS = {
    ("watch", "5 ms"): 1.05,
    ("watch", "50 ms"): 1.01,
    ("watch", "25 M"): 1.01,
    ("full", "25 M"): 1.15,
}
TITLES = {
    "5 ms": "a step of some 5 ms",
    "50 ms": "a step of some 50 ms",
    "25 M": "25 M parameters",
}


def measure_audit(rounds: int | None) -> list[Result]:
    results: list[Result] = []
    for mode in ("watch", "full"):
        models = [model for wanted, model in GOALS if wanted == mode]
        rows = [
            PairedRow(
                key=model,
                name=f'audit="{mode}", {TITLES[model]}, 2 ranks',
                against="the same steps, not watched",
                unit="ms",
                goal=GOALS[mode, model],
            )
            for model in models
        ]
        program = torchrun(str(PROGRAM), "--mode", mode, *models, ranks=2, name=f"audit {mode}")
        results += measure_pairs(rows, program, rounds=rounds, own_rounds=LAUNCHES[mode])
    return [*results, *(measure(row, rounds=rounds) for row in _script_rows())]


def _script_rows() -> list[Row]:
    """A whole program under `lockstep audit`, as its user starts it."""

    def row(title: str, first: int, end: int, *, goal: float | None, rounds: int) -> Row:
        script = (str(SCRIPT), "--timed", str(first), str(end))
        audit = ("-m", "lockstep.cli", "audit", "--nproc-per-node", "2")
        return Row(
            name=f"`lockstep audit`, a script's language model of 196 tensors, {title}, 2 ranks",
            ours=Contender("lockstep audit", (sys.executable, *audit, *script)),
            theirs=torchrun(*script, ranks=2),
            value="step",
            unit="ms",
            goal=goal,
            rounds=rounds,
        )

    return [
        row("one of the first 64 steps", 2, 64, goal=None, rounds=3),
        row("a step after them", 64, 320, goal=1.01, rounds=5),
    ]


FAMILY = Family(measure_audit)
