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


def _ours(name: str, *arguments: str) -> Contender:
    script = str(CONTENDERS / "recovery_lockstep.py")
    return Contender(f"lockstep, {name}", (sys.executable, script, *arguments))


OURS: dict[str, tuple[float | None, str, Contender]] = {
    "a spare ready": (0.5, "seconds", _ours("spare", "spare")),
    "fewer workers": (0.3, "seconds", _ours("shrinking", "shrink")),
    "in shards, a spare ready": (None, "new", _ours("shards, spare", "shards", "spare")),
    "in shards, fewer workers": (None, "new", _ours("shards, shrinking", "shards", "shrink")),
    "in two copies of two shards, a spare ready": (
        0.5,
        "seconds",
        _ours("copies", "copies", "spare"),
    ),
}
"""The mode, its goal in seconds, up to which step they are measured, and the program.

In shards the steps since the last checkpoint in memory are taken again, so the next new one
counts, for the others as well. A checkpoint takes 1 % of the time, so a recovery takes about as
long as a hundred of them, and has no goal of its own.
"""

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
    programs = [*(program for *_, program in OURS.values()), *others]
    runs: list[dict[str, dict[str, float]]] = []
    busiest = 0.0
    for number in range(rounds or ROUNDS):
        busiest = max(busiest, wait_until_quiet())
        turn = programs if number % 2 == 0 else programs[::-1]
        runs.append({program.name: run_once(program) for program in turn})
        print(f"  {runs[-1]}", file=sys.stderr)
    rows: list[Result] = []
    for mode, (goal_s, until, program) in OURS.items():
        rows += _rows(mode, goal_s, until, program, others, runs, busiest)
    if interpreter is None:
        rows.append(
            NotMeasured("kill to next step", RAY_TRAIN, f"≤ {RATIO_GOAL:g}", "not installed")
        )
    return rows


def _rows(
    mode: str,
    goal_s: float | None,
    until: str,
    program: Contender,
    others: Sequence[Contender],
    runs: Sequence[dict[str, dict[str, float]]],
    busiest: float,
) -> list[Result]:
    ours = tuple(run[program.name][until] for run in runs)
    redone = tuple(run[program.name]["redone"] for run in runs)
    quiet = busiest <= BUSY_LIMIT
    ratio_goal, goal_steps = (None, None) if goal_s is None else (RATIO_GOAL, 0.0)
    name = f"a worker is killed: to the next step, {mode}"
    rows: list[Result] = [Measured(name, "-", "s", goal_s, ours, (), busiest, quiet)]
    for other in others:
        theirs = tuple(run[other.name][until] for run in runs)
        again = max(run[other.name]["redone"] for run in runs)
        note = f"{other.name} took up to {again:.0f} steps again; lockstep {max(redone):.0f}."
        rows.append(Measured(name, other.name, "s", ratio_goal, ours, theirs, busiest, quiet, note))
    rows.append(
        Measured(
            f"steps taken again after a kill, {mode}",
            "-",
            "steps",
            goal_steps,
            redone,
            (),
            busiest,
            quiet,
        )
    )
    return rows


FAMILY = Family(measure_recovery, suites=frozenset({"full"}), ray_cpus=4, ray_module=MODULE)
