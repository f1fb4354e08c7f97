# SPDX-License-Identifier: Apache-2.0
"""The cost of one more call of `train()` beyond its steps, at two workers."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness import Contender, Row, family_of

ROW = Row(
    name="a call of train() beyond its steps, 2 workers",
    ours=Contender(
        name="lockstep",
        command=(
            sys.executable,
            str(Path(__file__).with_name("contenders") / "lockstep_second_call.py"),
        ),
    ),
    theirs=None,
    value="milliseconds",
    unit="ms",
    goal=10.0,
    rounds=3,
)

FAMILY = family_of(ROW, ray_cpus=4)
