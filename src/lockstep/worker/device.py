# SPDX-License-Identifier: Apache-2.0
"""Picks the device that a worker computes on."""

from __future__ import annotations

import torch

from lockstep.errors import NotAvailableError


def pick_device(use_gpu: bool, local_rank: int, is_here: bool = False) -> torch.device:
    """The GPU of the worker with this rank among those of its host; the CPU without `use_gpu`.

    Args:
        is_here: the worker lives in the driver, and others in actors of Ray. The driver sees all
            GPUs of the host; Ray, which does not know of this worker, gives the first ones to the
            actors. So it takes the last.

    Raises:
        NotAvailableError: torch finds no GPU.
    """
    if not use_gpu:
        return torch.device("cpu")
    # Ray shows a worker only its own GPUs; without Ray, the ranks of a node share one list of GPUs.
    count = torch.cuda.device_count()
    if count == 0:
        raise NotAvailableError(
            "this worker was to use a GPU, and torch finds none",
            where=f"a worker with local rank {local_rank}",
            got="use_gpu=True, torch.cuda.device_count() == 0",
            fix="use_gpu=False, or a torch that finds this machine's GPUs; if it was True,"
            ' use_gpu="auto"',
        )
    device = torch.device("cuda", count - 1 if is_here else local_rank % count)
    torch.cuda.set_device(device)
    return device
