# SPDX-License-Identifier: Apache-2.0
"""From the kill of a worker to the next step, against what restarts everybody."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.harness import BUSY_LIMIT, Contender, Family, run_once, wait_until_quiet
from benchmarks.peers import interpreter_with
from benchmarks.startup import CONTENDERS
from benchmarks.verdict import Measured, NotMeasured, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE = "ray.train.torch"
ROUNDS = 3
RATIO_GOAL = 0.05

OURS = {
    "a spare ready": (
        0.5,
        Contender(
            "lockstep, spare",
            (sys.executable, str(CONTENDERS / "recovery_lockstep.py"), "spare"),
        ),
    ),
    "fewer workers": (
        0.3,
        Contender(
            "lockstep, shrinking",
            (sys.executable, str(CONTENDERS / "recovery_lockstep.py"), "shrink"),
        ),
    ),
}
"""The mode, its goal in seconds, and the program."""

TORCHRUN = Contender(
    "torchrun --max-restarts, checkpoint every 10 steps",
    (sys.executable, str(CONTENDERS / "recovery_torchrun.py")),
)
RAY_TRAIN = "Ray Train FailureConfig, checkpoint every 10 steps"


def measure_recovery(rounds: int | None) -> list[Result]:
    interpreter = interpreter_with(MODULE)
    others = [TORCHRUN]
    if interpreter is not None:
        script = str(CONTENDERS / "recovery_ray_train.py")
        others.append(Contender(RAY_TRAIN, (interpreter, script)))
    programs = [*(program for _, program in OURS.values()), *others]
    runs: list[dict[str, dict[str, float]]] = []
    busiest = 0.0
    for number in range(rounds or ROUNDS):
        busiest = max(busiest, wait_until_quiet())
        turn = programs if number % 2 == 0 else programs[::-1]
        runs.append({program.name: run_once(program) for program in turn})
        print(f"  {runs[-1]}", file=sys.stderr)
    rows: list[Result] = []
    for mode, (goal_s, program) in OURS.items():
        rows += _rows(mode, goal_s, program, others, runs, busiest)
    if interpreter is None:
        rows.append(
            NotMeasured("kill to next step", RAY_TRAIN, f"≤ {RATIO_GOAL:g}", "not installed")
        )
    return rows


def _rows(
    mode: str,
    goal_s: float,
    program: Contender,
    others: Sequence[Contender],
    runs: Sequence[dict[str, dict[str, float]]],
    busiest: float,
) -> list[Result]:
    ours = tuple(run[program.name]["seconds"] for run in runs)
    quiet = busiest <= BUSY_LIMIT
    name = f"a worker of 3 is killed: to the next step, {mode}"
    rows: list[Result] = [Measured(name, "-", "s", goal_s, ours, (), busiest, quiet)]
    for other in others:
        theirs = tuple(run[other.name]["seconds"] for run in runs)
        again = max(run[other.name]["redone"] for run in runs)
        note = f"{other.name} took up to {again:.0f} steps again; lockstep took none."
        rows.append(Measured(name, other.name, "s", RATIO_GOAL, ours, theirs, busiest, quiet, note))
    redone = tuple(run[program.name]["redone"] for run in runs)
    rows.append(
        Measured(
            f"steps taken again after a kill, {mode}", "-", "steps", 0.0, redone, (), busiest, quiet
        )
    )
    return rows


FAMILY = Family(measure_recovery, suites=frozenset({"full"}), ray_cpus=4, ray_module=MODULE)
