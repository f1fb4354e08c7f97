# SPDX-License-Identifier: Apache-2.0
"""An epoch through `TorchTrainer.train()`: data, metrics and the call itself included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs
from benchmarks.steps import MODELS

if TYPE_CHECKING:
    from benchmarks.verdict import Result

PROGRAM = Path(__file__).with_name("contenders") / "training.py"
LAUNCHES = 1
GOAL = 1.03


def measure_training(rounds: int | None, *, workers: int = 2) -> list[Result]:
    rows = [
        PairedRow(
            key=key,
            name=f"a step of TorchTrainer.train(), {title}, {workers} workers",
            against="hand-written DDP loop, DataLoader, .item()",
            unit="ms",
            goal=GOAL,
        )
        for key, title in MODELS.items()
    ]
    program = Contender("training", (sys.executable, str(PROGRAM), "--workers", str(workers)))
    return measure_pairs(rows, program, rounds=rounds, own_rounds=LAUNCHES)


def _on_every_device(rounds: int | None) -> list[Result]:
    return measure_training(rounds, workers=torch.cuda.device_count())


FAMILY = Family(measure_training, ray_cpus=4)
CUDA_FAMILY = Family(_on_every_device, suites=frozenset({"gpu"}), ray_cpus=16)
