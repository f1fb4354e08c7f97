# SPDX-License-Identifier: Apache-2.0
"""Saving a model of 100 M parameters, until it is safe on the disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "checkpoint.py"
AGAINST = "torch.save and fsync"

ROW = PairedRow(
    key="total",
    name="checkpoint of 100 M parameters, total",
    against=AGAINST,
    unit="s",
    goal=1.1,
)
WAITING = PairedRow(
    key="waiting",
    name="checkpoint of 100 M parameters, while training waits",
    against=AGAINST,
    unit="s",
    goal=0.5,
)


def measure_checkpoints(rounds: int | None) -> list[Result]:
    program = Contender("checkpoint", (sys.executable, str(PROGRAM)))
    return measure_pairs([ROW, WAITING], program, rounds=rounds)


FAMILY = Family(measure_checkpoints)
