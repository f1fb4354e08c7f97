# SPDX-License-Identifier: Apache-2.0
"""Starting, and being called a second time, against Ray Train, on a Ray that already runs."""

from __future__ import annotations

from benchmarks.harness import BUSY_LIMIT, Contender, Family, run_once, wait_until_quiet
from benchmarks.peers import interpreter_with
from benchmarks.startup import CONTENDERS, LOCKSTEP
from benchmarks.verdict import Measured, NotMeasured, Result

MODULE = "ray.train.torch"
GOAL = 0.5
ROUNDS = 3
AGAINST = "Ray Train, fit()"
ROWS = {
    "seconds": "process start to first step, 2 workers",
    "second_call": "the second call, to its first step, 2 workers",
}
"""By the key of the contenders' results."""


def measure_ray_train(rounds: int | None) -> list[Result]:
    interpreter = interpreter_with(MODULE)
    if interpreter is None:
        return [
            NotMeasured(name, AGAINST, f"≤ {GOAL:g}", "not installed") for name in ROWS.values()
        ]
    theirs = Contender(AGAINST, (interpreter, str(CONTENDERS / "ray_train_startup.py")))
    runs: list[tuple[dict[str, float], dict[str, float]]] = []
    busiest = 0.0
    for number in range(rounds or ROUNDS):
        busiest = max(busiest, wait_until_quiet())
        turn = (LOCKSTEP, theirs) if number % 2 == 0 else (theirs, LOCKSTEP)
        first, second = map(run_once, turn)
        runs.append((first, second) if number % 2 == 0 else (second, first))
    return [
        Measured(
            name=name,
            against=AGAINST,
            unit="s",
            goal=GOAL,
            ours=tuple(ours[key] for ours, _ in runs),
            theirs=tuple(fit[key] for _, fit in runs),
            busiest=busiest,
            quiet=busiest <= BUSY_LIMIT,
        )
        for key, name in ROWS.items()
    ]


FAMILY = Family(measure_ray_train, suites=frozenset({"full"}), ray_cpus=4, ray_module=MODULE)
