# SPDX-License-Identifier: Apache-2.0
"""Starting, and being called a second time, against Ray Train, on a Ray that already runs."""

from __future__ import annotations

from benchmarks.harness import Contender, Family, Row, measure
from benchmarks.peers import interpreter_with
from benchmarks.startup import CONTENDERS, LOCKSTEP
from benchmarks.verdict import NotMeasured, Result

MODULE = "ray.train.torch"
GOAL = 0.5
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
    return [
        measure(
            Row(name, LOCKSTEP, theirs, value=key, unit="s", goal=GOAL, rounds=3), rounds=rounds
        )
        for key, name in ROWS.items()
    ]


FAMILY = Family(measure_ray_train, suites=frozenset({"full"}), ray_cpus=4, ray_module=MODULE)
