# SPDX-License-Identifier: Apache-2.0
"""What is trained while a worker is killed, and who kills it.

Every worker writes a line for each step that its optimizer has taken: when, which, and who. The
seconds to the next step are those from the kill to the first line after the longest silence before
training has come further than it was, so that a step that was complete already when the worker died
counts for nobody.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 400
KILL_AFTER_STEP = 57
CHECKPOINT_EVERY = 10
BATCH_SIZE = 32
"""Of one worker."""


def make_model() -> nn.Module:
    """A million parameters: about 40 ms a step on one slow core."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(14):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    samples = STEPS * 3 * BATCH_SIZE
    return TensorDataset(
        torch.randn(samples, 256, generator=generator),
        torch.randint(10, (samples,), generator=generator),
    )


def note_step(folder: str, step: int, rank: int) -> None:
    """The optimizer has taken step number `step`."""
    line = f"{time.monotonic()!r} {step} {rank} {os.getpid()}\n"
    with Path(folder, f"{os.getpid()}").open("a") as file:
        file.write(line)


def steps_noted(folder: str) -> list[tuple[float, int, int, int]]:
    found: list[tuple[float, int, int, int]] = []
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 4:
                found.append((float(words[0]), *map(int, words[1:])))
    return sorted(found)


class Killer(threading.Thread):
    """Kills the worker of rank 1 in the middle of the training."""

    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.killed_at = 0.0

    def run(self) -> None:
        while True:
            victims = [
                pid
                for _, step, rank, pid in steps_noted(self._folder)
                if rank == 1 and step >= KILL_AFTER_STEP
            ]
            if victims:
                self.killed_at = time.monotonic()
                os.kill(victims[0], signal.SIGKILL)
                return
            time.sleep(0.005)


def outcome(folder: str, killed_at: float) -> dict[str, Any]:
    """Seconds from the kill to the next step, to the next new one, and steps taken twice."""
    steps = steps_noted(folder)
    before = {step for at, step, *_ in steps if at <= killed_at}
    later = [(at, step) for at, step, *_ in steps if at > killed_at]
    # Not beyond: a worker that joins afterwards makes another silence.
    recovered_at = min(at for at, step in later if step > max(before) + 1)
    times = [killed_at, *(at for at, _ in later if at <= recovered_at)]
    _, resumed_at = max((after - at, after) for at, after in itertools.pairwise(times))
    again = {step for at, step, *_ in steps if at >= resumed_at}
    new_at = min(at for at, step, *_ in steps if at >= resumed_at and step > max(before))
    return {
        "seconds": resumed_at - killed_at,
        "new": new_at - killed_at,
        "redone": float(len(before & again)),
    }
