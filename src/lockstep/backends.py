# SPDX-License-Identifier: Apache-2.0
"""What depends on the backend of a process group: gloo or NCCL, registered with torch or raw."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist


def metadata_device(process_group: Any | None) -> torch.device:
    """Where small tensors travel: the CPU, wherever the backend can carry them."""
    if process_group is None or not torch.cuda.is_available():
        return torch.device("cpu")
    # A raw backend has no list of devices; of those only NCCL cannot carry CPU tensors.
    devices = getattr(process_group, "_device_types", None)
    if devices is not None:
        carries_cpu = torch.device("cpu") in devices
    else:
        carries_cpu = "nccl" not in str(process_group.name()).lower()
    return torch.device("cpu") if carries_cpu else torch.device("cuda", torch.cuda.current_device())


def timeout_s(process_group: Any) -> float:
    """How long a collective may take, in seconds; infinite if the backend does not say."""
    backend = process_group
    if isinstance(process_group, dist.ProcessGroup) and hasattr(process_group, "_get_backend"):
        backend = process_group._get_backend(torch.device("cpu"))
    options = getattr(backend, "options", None)
    return math.inf if options is None else float(options._timeout.total_seconds())


def abort_nccl(group: Any) -> None:
    """End what runs on `group`, if NCCL does it; from any thread. For gloo see `GlooSockets`."""
    if isinstance(group, dist.ProcessGroup):
        if dist.get_backend(group) == "nccl":
            group._get_backend(torch.device("cuda")).abort()
    elif "nccl" in type(group).__name__.lower():
        group.abort()
