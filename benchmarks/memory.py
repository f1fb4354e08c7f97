# SPDX-License-Identifier: Apache-2.0
"""Memory of one worker, at rest and in training, beyond what Ray itself takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import Contender, Family, run_once
from benchmarks.steps import torchrun
from benchmarks.verdict import Measured, NotMeasured, Result

CONTENDERS = Path(__file__).with_name("contenders")
LAUNCHES = 2
GOAL = 1.05
AGAINST = "hand-written DDP loop"
NAMES = {
    "rest": "memory of a worker at rest, 8 M MLP",
    "training": "memory of a worker in training, 8 M MLP",
}


def measure_memory(rounds: int | None) -> list[Result]:
    if not Path("/proc/self/smaps_rollup").is_file():
        return [NotMeasured(name, AGAINST, f"≤ {GOAL:g}", "Linux only") for name in NAMES.values()]
    program = str(CONTENDERS / "memory_lockstep.py")
    lockstep = Contender("memory, lockstep", (sys.executable, program))
    by_hand = torchrun(str(CONTENDERS / "memory_torchrun.py"), ranks=2, name="memory, DDP")
    runs = [(run_once(lockstep), run_once(by_hand)) for _ in range(rounds or LAUNCHES)]
    return [_row(state, runs) for state in NAMES]


def _row(state: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Measured:
    of_ray = [ours["bare"] - theirs["bare"] for ours, theirs in runs]
    return Measured(
        name=NAMES[state],
        against=AGAINST,
        unit="MiB",
        goal=GOAL,
        ours=tuple(ours[state] - ray for (ours, _), ray in zip(runs, of_ray, strict=True)),
        theirs=tuple(theirs[state] for _, theirs in runs),
        busiest=0.0,
        quiet=True,
        note=f"private written pages; Ray's own part, {max(of_ray):.0f} MiB a worker (an actor"
        " that only imports torch, against a process that does), is taken off.",
    )


FAMILY = Family(measure_memory, ray_cpus=4)
