# SPDX-License-Identifier: Apache-2.0
"""A model in units: the time of a step and the peak of a worker, beside torch's `fully_shard`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Family, PairedRow, Row, measure, measure_pairs
from benchmarks.steps import torchrun

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = str(Path(__file__).with_name("contenders") / "units.py")
RANKS = 4
MODEL = "24 blocks in units, 30 M, Adam, 4 ranks"
_BY_HAND = "fully_shard by hand"


def measure_units(
    rounds: int | None, *, ranks: int = RANKS, device: str = "cpu", model: str = MODEL
) -> list[Result]:
    launched = partial(torchrun, PROGRAM, "--device", device, ranks=ranks)
    step = PairedRow(key="step", name=f"one step, {model}", against=_BY_HAND, unit="ms", goal=1.03)
    results = measure_pairs([step], launched(name="units"), rounds=rounds, own_rounds=3)

    def peak(other: str, against: str, goal: float | None, own_rounds: int) -> Row:
        return Row(
            name=f"peak of training, {model}, against {against}",
            ours=launched("--side", "units", name="units"),
            theirs=launched("--side", other, name=against),
            value="peak",
            unit="MiB",
            goal=goal,
            rounds=own_rounds,
        )

    # What the allocator keeps of freed memory varies from run to run, by a third on either side.
    rows = [peak("torch", _BY_HAND, 1.05, 8), peak("whole", "replicate", None, 2)]
    return [*results, *(measure(row, rounds=rounds) for row in rows)]


def _on_every_device(rounds: int | None) -> list[Result]:
    count = torch.cuda.device_count()
    model = f"24 blocks in units, 1.2 G, bf16, Adam, {count} x cuda"
    return measure_units(rounds, ranks=count, device="cuda", model=model)


FAMILY = Family(measure_units)
CUDA_FAMILY = Family(_on_every_device, suites=frozenset({"gpu"}))
