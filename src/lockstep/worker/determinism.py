# SPDX-License-Identifier: Apache-2.0
"""The same arithmetic wherever a shard runs: deterministic kernels, one number of threads."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(threads: int | None) -> Iterator[None]:
    """Deterministic algorithms, and `threads` threads for an operation, inside the block.

    How a sum is split over threads is part of its bits, so a worker in the driver's process
    must not use more of them than an actor with one CPU does. Everything is put back.
    """
    algorithms = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, count = torch.backends.cudnn.benchmark, torch.get_num_threads()
    workspace = os.environ.get(_CUBLAS_VARIABLE)
    if torch.version.cuda is not None and workspace is None:
        os.environ[_CUBLAS_VARIABLE] = ":4096:8"  # as torch asks for; read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=only_warns)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(count)
        if workspace is None:
            os.environ.pop(_CUBLAS_VARIABLE, None)
