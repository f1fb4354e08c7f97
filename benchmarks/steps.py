# SPDX-License-Identifier: Apache-2.0
"""One training step of `lockstep.replicate`, against DDP by hand and against each peer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.harness import Contender, Family, PairedRow, measure_pairs
from benchmarks.peers import interpreter_with
from benchmarks.verdict import NotMeasured, Result

PROGRAM = Path(__file__).with_name("contenders") / "steps.py"
LAUNCHES = {"ddp": 2}
"""Of 20 pairs each; one for the peers, which are all built on DDP."""
GOAL = 1.0

MODELS = {
    "tiny": "MLP 64x4",
    "many": "200 small layers",
    "large": "8 M MLP",
    "convnet": "convnet",
    "transformer": "small transformer",
}
"""As in `contenders/models.py`, which the harness itself does not import."""

SIDES = {
    "ddp": ("hand-written DDP loop", "torch"),
    "accelerate": ("Accelerate", "accelerate"),
    "fabric": ("Lightning Fabric", "lightning_fabric"),
}
"""By the program's argument: how the table calls it, and the module that it needs."""


def torchrun(
    *arguments: str, ranks: int, interpreter: str = sys.executable, name: str = "torchrun"
) -> Contender:
    """A program under torchrun on this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return Contender(name, (interpreter, *launcher, *arguments))


def step_rows(against: str, *, ranks: int, device: str = "cpu") -> list[PairedRow]:
    where = f"{ranks} ranks" if device == "cpu" else f"{ranks} x {device}"
    return [
        PairedRow(
            key=key,
            name=f"one step, {title}, {where}",
            against=SIDES[against][0],
            unit="ms",
            goal=GOAL,
        )
        for key, title in MODELS.items()
    ]


def measure_steps(rounds: int | None, *, ranks: int = 2, device: str = "cpu") -> list[Result]:
    """Every model against everybody who is installed."""
    results: list[Result] = []
    for against, (_, module) in SIDES.items():
        rows = step_rows(against, ranks=ranks, device=device)
        interpreter = interpreter_with(module)
        if interpreter is None:
            results += [
                NotMeasured(row.name, row.against, f"≤ {GOAL:g}", "not installed") for row in rows
            ]
            continue
        arguments = (str(PROGRAM), "--against", against, "--device", device)
        program = torchrun(
            *arguments, ranks=ranks, interpreter=interpreter, name=f"steps {against}"
        )
        results += measure_pairs(rows, program, rounds=rounds, own_rounds=LAUNCHES.get(against, 1))
    return results


def _on_every_device(rounds: int | None) -> list[Result]:
    return measure_steps(rounds, ranks=torch.cuda.device_count(), device="cuda")


FAMILY = Family(measure_steps)
CUDA_FAMILY = Family(_on_every_device, suites=frozenset({"gpu"}))
