# SPDX-License-Identifier: Apache-2.0
"""What ``shadow_every`` costs: a step of a run that computes shards twice, against one of none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs
from benchmarks.steps import MODELS

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "shadow.py"
LAUNCHES = 2
EVERY = 10
MEASURED = ("large", "transformer")


def measure_shadow(rounds: int | None) -> list[Result]:
    rows = [
        PairedRow(
            key=model,
            name=f"a step with shadow_every={EVERY}, {MODELS[model]}, 2 workers of one shard",
            against="the same without it",
            unit="ms",
            # A shard more in one step of ten, and a little for the samples and the hashes.
            goal=1.0 + 1.2 / EVERY,
        )
        for model in MEASURED
    ]
    command = (sys.executable, str(PROGRAM), *MEASURED, "--every", str(EVERY))
    return measure_pairs(rows, Contender("shadow", command), rounds=rounds, own_rounds=LAUNCHES)


FAMILY = Family(measure_shadow, ray_cpus=4)
