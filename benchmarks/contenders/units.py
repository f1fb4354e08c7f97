# SPDX-License-Identifier: Apache-2.0
"""A transformer whose blocks are units: lockstep's, torch's ``fully_shard`` by hand, and whole.

Started by torchrun. Without ``--side`` it times one step of lockstep's against one of torch's, in
neighbouring blocks. With it, it trains one side alone and reports by how much its memory grew;
with ``--trace``, how much memory it has from moment to moment of a step. On CUDA devices the model
is larger, and computes in bf16.
"""

from __future__ import annotations

import argparse
import ctypes
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

BLOCKS, ROWS, LENGTH = 24, 2, 64
WIDTH = {"cpu": 320, "cuda": 2048}
"""30 M and 1.2 G parameters."""
STEPS = 3
PAIRS = 8
WARM_UP = 3
"""Two steps in which the ranks compare the order of units, and the first one that follows it."""


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    width = WIDTH[device.type]
    with device:
        blocks = (
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
        return nn.Sequential(*blocks)


def _step(side: str, device: torch.device) -> Callable[[], None]:
    """One step of one side; the model and its optimizer are made first."""
    model = _model(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    random = torch.Generator().manual_seed(dist.get_rank())
    features = torch.randn(ROWS, LENGTH, WIDTH[device.type], generator=random).to(device)
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
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(features).square().mean()
        backward(loss)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


class _Memory:
    """What this process has for itself, in MiB, since this object was made.

    On the CPU the pages of the process, on CUDA what torch has allocated there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._now()

    def now(self) -> float:
        return self._now() - self._before

    def forget_peak(self) -> None:
        """The whole model was there for a moment, on every side: the peak of training counts."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20 - self._before
        return _status("VmHWM") - self._before

    def _now(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated() / 2**20
        return _status("VmRSS")


def _status(line: str) -> float:
    """A line of ``/proc/self/status``, in MiB."""
    for each in Path("/proc/self/status").read_text().splitlines():
        if each.startswith(f"{line}:"):
            return int(each.split()[1]) / 1024
    raise OSError(f"no {line} in /proc/self/status")


def _give_back_what_is_freed() -> None:
    """Let each tensor have pages of its own, so that the process shrinks when one is freed.

    glibc keeps smaller blocks for later, and what a process has would only grow over a step.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16)


def _trace(step: Callable[[], None], memory: _Memory) -> list[tuple[float, float]]:
    """The milliseconds and the MiB of each moment of a step."""
    moments: list[tuple[float, float]] = []
    is_over = threading.Event()

    def sample() -> None:
        begun = time.perf_counter()
        while not is_over.wait(0.002):
            moments.append((1000 * (time.perf_counter() - begun), memory.now()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    step()
    is_over.set()
    sampler.join()
    return moments


def _measure(side: str | None, device: torch.device, *, trace: bool) -> dict[str, object]:
    if side is None:
        ours, theirs = _step("units", device), _step("torch", device)
        for _ in range(WARM_UP):
            ours(), theirs()
        times = interleaved(ours, theirs, pairs=PAIRS, steps=STEPS, meet=dist.barrier)
        return {"step": {name: [1000 * t for t in values] for name, values in times.items()}}
    memory = _Memory(device)
    step = _step(side, device)
    memory.forget_peak()
    for _ in range(STEPS):
        step()
    found: dict[str, object] = {"peak": memory.peak()}
    return found | {"trace": _trace(step, memory)} if trace else found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("units", "torch", "whole"))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.trace:
        _give_back_what_is_freed()
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo")
    found = _measure(given.side, device, trace=given.trace)
    if dist.get_rank() == 0:
        report(**found)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
