# SPDX-License-Identifier: Apache-2.0
"""Run a function on two processes that form a process group, as torchrun would."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


def on_two_ranks(program: Callable[[int], Any]) -> list[Any]:
    """What `program(rank)` returned on each rank."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, spawn) as pool:
        store = str(Path(folder) / "store")
        return [each.result() for each in [pool.submit(_one, program, r, store) for r in (0, 1)]]


def _one(program: Callable[[int], Any], rank: int, store: str) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        return program(rank)
    finally:
        dist.destroy_process_group()
