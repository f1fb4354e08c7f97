# SPDX-License-Identifier: Apache-2.0
"""What a call of `train()` costs the driver: an epoch of one step, called again and again."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness import Contender, Row, family_of

PROGRAM = Path(__file__).with_name("contenders") / "calls.py"
MANY = (4, 8, 16)


def _row(workers: int) -> Row:
    return Row(
        name=f"train() for an epoch of one step, {workers} workers",
        ours=Contender(f"{workers} workers", (sys.executable, str(PROGRAM), str(workers))),
        theirs=None,
        value="milliseconds",
        unit="ms",
        goal=10.0 if workers == 2 else None,
        rounds=3 if workers == 2 else 1,
    )


FAMILY = family_of(_row(2), ray_cpus=16)
FULL_FAMILY = family_of(*map(_row, MANY), suites=("full",), ray_cpus=16)
