# SPDX-License-Identifier: Apache-2.0
"""How much memory a process has for itself alone."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path


def private_mb() -> float:
    """Private, written pages of this process in MiB: no shared library, no shared store.

    Nor pages that were freed and that the C library keeps for the next allocation: of the same
    program it keeps 10 MiB in one launch and 90 in another.

    Raises:
        OSError: not on Linux.
    """
    gc.collect()
    with suppress(AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise OSError("no Private_Dirty in /proc/self/smaps_rollup")
