# SPDX-License-Identifier: Apache-2.0
"""Properties of an existing process group that depend on its backend, gloo or NCCL.

The device for metadata, the timeout of a collective, and the abort of collectives that run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep._torch_compat import backend_of, backend_timeout_s, devices_of


def metadata_device(process_group: Any | None) -> torch.device:
    """The device for small tensors of metadata: the CPU, if the backend sends CPU tensors."""
    if process_group is None or not torch.cuda.is_available():
        return torch.device("cpu")
    # A raw backend has no list of devices; NCCL is the only one that sends no CPU tensors.
    devices = devices_of(process_group)
    if devices is not None:
        carries_cpu = torch.device("cpu") in devices
    else:
        carries_cpu = "nccl" not in str(process_group.name()).lower()
    return torch.device("cpu") if carries_cpu else torch.device("cuda", torch.cuda.current_device())


def timeout_s(process_group: Any) -> float:
    """The timeout of a collective, in seconds; infinite if the backend has no options."""
    return backend_timeout_s(backend_of(process_group, "cpu"))


def abort_nccl(group: Any) -> None:
    """Abort the collectives that run on `group`, if its backend is NCCL; from any thread.

    For gloo see `GlooSockets`.
    """
    if isinstance(group, dist.ProcessGroup):
        if dist.get_backend(group) == "nccl":
            backend_of(group, "cuda").abort()
    elif "nccl" in type(group).__name__.lower():
        group.abort()
