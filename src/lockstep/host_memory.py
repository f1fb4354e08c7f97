# SPDX-License-Identifier: Apache-2.0
"""Memory of the host: how much more of it this process may take, and errors that it lacks."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_CPU_ALLOCATOR: Final = "DefaultCPUAllocator:"


def available_memory() -> float:
    """Bytes; infinite where the system does not tell."""
    return min(_available_on_host(), _available_in_cgroup())


def _available_on_host() -> float:
    with suppress(OSError, ValueError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return math.inf


def _available_in_cgroup() -> float:
    """By the limit of a container (cgroup v2), whose page cache can be had again."""
    with suppress(OSError, ValueError, KeyError):
        limit = int((_CGROUP / "memory.max").read_text())  # a ValueError for "max"
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        cache = int(dict(line.split() for line in lines)["inactive_file"])
        return float(limit - used + cache)
    return math.inf


def is_lack_of_memory(error: Exception) -> bool:
    """Whether `error` says that memory ran out, on the host or on a device.

    torch's allocator for the CPU raises a RuntimeError that only its text tells from others.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )
