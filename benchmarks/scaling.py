# SPDX-License-Identifier: Apache-2.0
"""Samples a second at 1, 2, 4 and 8 workers, against DDP and DataParallel.

Weak scaling: every worker keeps its batch. Strong scaling: the global batch stays the same. With
more workers than processors a step only shows what coordinating them costs: there is no more
arithmetic to be had.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import Family, PairedRow, measure_pairs
from benchmarks.steps import torchrun
from benchmarks.verdict import Measured, NotMeasured, Result

PROGRAM = Path(__file__).with_name("contenders") / "steps.py"
MODEL, TITLE = "transformer", "small transformer"
BATCH = 8
"""Of one worker under weak scaling; of all together under strong scaling."""
WORKERS = (1, 2, 4, 8)
GOAL = 1.0


def measure_scaling(
    rounds: int | None, *, workers: tuple[int, ...] = WORKERS, device: str = "cpu"
) -> list[Result]:
    results: list[Result] = []
    for kind in ("weak", "strong"):
        rows = [_measured(kind, count, rounds, device) for count in workers]
        results += [_with_throughput(row, rows[0], kind) for row in rows]
    return [*results, *_data_parallel(rounds, device)]


def _workers_of(row: Measured) -> int:
    return int(row.name.rsplit(" ", 2)[1])


def _measured(kind: str, workers: int, rounds: int | None, device: str) -> Measured:
    batch = BATCH if kind == "weak" else BATCH // workers
    row = PairedRow(
        key=MODEL,
        name=f"{kind} scaling, {TITLE}, batch {batch} each, {workers} workers",
        against="hand-written DDP loop",
        unit="ms",
        goal=GOAL,
    )
    arguments = (str(PROGRAM), "--device", device, "--batch-size", str(batch), MODEL)
    program = torchrun(*arguments, ranks=workers, name=row.name)
    (measured,) = measure_pairs([row], program, rounds=rounds, own_rounds=2)
    assert isinstance(measured, Measured)
    return measured


def _with_throughput(row: Measured, alone: Measured, kind: str) -> Measured:
    """The same row, and in words: samples a second, and which part of N times one worker."""
    workers = _workers_of(row)
    total = BATCH * workers if kind == "weak" else BATCH
    said = []
    for name, side in (("ours", "ours"), ("theirs", "theirs")):
        step = statistics.median(getattr(row, side))
        first = statistics.median(getattr(alone, side))
        speed_up = first / step * (workers if kind == "weak" else 1)
        said.append(
            f"{name} {1000 * total / step:.0f} samples/s, efficiency {speed_up / workers:.2f}"
        )
    note = "; ".join(said) + "."
    cores = os.cpu_count() or 1
    if workers > cores:
        note += f" {workers} workers share {cores} processors: this row is about coordination."
    return replace(row, note=note)


def _data_parallel(rounds: int | None, device: str) -> list[Result]:
    count = torch.cuda.device_count() if device == "cuda" else 0
    row = PairedRow(
        key=MODEL,
        name=f"one step, {TITLE}, {count} devices",
        against="DataParallel",
        unit="ms",
        goal=GOAL,
    )
    if count < 2:
        reason = "needs two CUDA devices"
        return [NotMeasured(f"one step, {TITLE}", row.against, f"≤ {GOAL:g}", reason)]
    arguments = (str(PROGRAM), "--against", "data_parallel", "--device", device, MODEL)
    return measure_pairs([row], torchrun(*arguments, ranks=count), rounds=rounds, own_rounds=2)


def _on_every_device(rounds: int | None) -> list[Result]:
    count = torch.cuda.device_count()
    workers = tuple(number for number in WORKERS if number <= count)
    return measure_scaling(rounds, workers=workers, device="cuda")


FAMILY = Family(measure_scaling, suites=frozenset({"full"}))
CUDA_FAMILY = Family(_on_every_device, suites=frozenset({"gpu"}))
