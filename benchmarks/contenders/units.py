# SPDX-License-Identifier: Apache-2.0
"""A transformer whose blocks are units: lockstep's, torch's ``fully_shard`` by hand, and whole.

Started by torchrun. Without ``--side`` it times one step of lockstep's against one of torch's, in
neighbouring blocks. With it, it trains one side alone and reports by how much the process grew;
with ``--trace``, how much memory it has from moment to moment of a step.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from blocks import interleaved
from lockstep import replicate
from lockstep.group import Group
from lockstep.sync.sharded_sync import ShardedSync
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BLOCKS, ROWS, LENGTH = 320, 24, 2, 64
STEPS = 3
PAIRS = 8


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(BLOCKS)
    )
    return nn.Sequential(*blocks)


def _step(side: str) -> Callable[[], None]:
    """One step of one side; the model and its optimizer are made first."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    features = torch.randn(
        ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    if side == "units":
        world = dist.group.WORLD
        backward = ShardedSync([model], Group(world), [optimizer], shard="auto").backward
    elif side == "torch":
        for block in model.children():
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    else:
        backward = replicate(model).backward

    def step() -> None:
        optimizer.zero_grad()
        backward(model(features).square().mean())
        optimizer.step()

    return step


def _memory(line: str) -> float:
    """A line of ``/proc/self/status``, in MiB."""
    for each in Path("/proc/self/status").read_text().splitlines():
        if each.startswith(f"{line}:"):
            return int(each.split()[1]) / 1024
    raise OSError(f"no {line} in /proc/self/status")


def _private() -> float:
    """What this process has for itself now, in MiB."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _trace(step: Callable[[], None], before: float) -> list[tuple[float, float]]:
    """The milliseconds and the MiB above `before` of each moment of a step."""
    moments: list[tuple[float, float]] = []
    is_over = threading.Event()

    def sample() -> None:
        begun = time.perf_counter()
        while not is_over.wait(0.002):
            moments.append((1000 * (time.perf_counter() - begun), _private() - before))

    sampler = threading.Thread(target=sample)
    sampler.start()
    step()
    is_over.set()
    sampler.join()
    return moments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("units", "torch", "whole"))
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    side = given.side
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if side is None:
        ours, theirs = _step("units"), _step("torch")
        ours(), theirs()
        times = interleaved(ours, theirs, pairs=PAIRS, steps=STEPS, meet=dist.barrier)
        found: dict[str, object] = {
            "step": {name: [1000 * t for t in values] for name, values in times.items()}
        }
    else:
        before, before_private = _memory("VmRSS"), _private()
        step = _step(side)
        # The whole model was there for a moment, on every side: the peak of training counts.
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(STEPS):
            step()
        found = {"peak": _memory("VmHWM") - before}
        if given.trace:
            found["trace"] = _trace(step, before_private)
    if dist.get_rank() == 0:
        report(**found)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
