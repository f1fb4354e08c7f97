# SPDX-License-Identifier: Apache-2.0
"""From process start to the first completed step with two workers, on a Ray that already runs."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness import Contender, Row, family_of

CONTENDERS = Path(__file__).with_name("contenders")

TORCHRUN = Contender(
    name="torchrun, hand-written DDP",
    command=(
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        str(CONTENDERS / "torchrun_startup.py"),
    ),
)
LOCKSTEP = Contender(
    name="lockstep", command=(sys.executable, str(CONTENDERS / "lockstep_startup.py"))
)

ROW = Row(
    name="process start to first step, 2 workers",
    ours=LOCKSTEP,
    theirs=TORCHRUN,
    value="seconds",
    unit="s",
    goal=1.0,
    rounds=5,
)

PRESTARTED_ROW = Row(
    name="the same with lockstep.prestart() before torch is imported",
    ours=Contender(
        name="lockstep, prestarted",
        command=(sys.executable, str(CONTENDERS / "lockstep_prestart.py")),
    ),
    theirs=TORCHRUN,
    value="seconds",
    unit="s",
    goal=1.0,
    rounds=5,
)

FAMILY = family_of(ROW, PRESTARTED_ROW, ray_cpus=4)
