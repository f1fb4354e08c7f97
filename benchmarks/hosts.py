# SPDX-License-Identifier: Apache-2.0
"""A step over a slow link between two hosts, and what crosses it, against DDP."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs
from benchmarks.network_namespaces import are_possible
from benchmarks.verdict import NotMeasured, Result

PROGRAM = Path(__file__).with_name("contenders") / "hosts.py"
AGAINST = "hand-written DDP loop, ranks in host order"
WHERE = "25 M MLP, 2 hosts x 2 ranks, 1 Gbit/s between the hosts"
NOTE = "the hosts are network namespaces, and the cable between them has a token bucket filter."
ROWS = (
    PairedRow("seconds", f"one step, {WHERE}", AGAINST, "s", 0.75, note=NOTE),
    PairedRow("mebibytes", f"over the link in a step, {WHERE}", AGAINST, "MiB", 2 / 3),
)


def measure_hosts(rounds: int | None) -> list[Result]:
    if not are_possible():
        return [
            NotMeasured(row.name, row.against, f"≤ {row.goal:.3g}", "needs root, Linux, ip, tc")
            for row in ROWS
        ]
    launcher = (sys.executable, "-m", "benchmarks.network_namespaces", "--rate", "1gbit")
    return measure_pairs(ROWS, Contender("hosts", (*launcher, str(PROGRAM))), rounds=rounds)


FAMILY = Family(measure_hosts)
