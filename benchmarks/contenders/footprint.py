# SPDX-License-Identifier: Apache-2.0
"""How much memory a process has for itself alone."""

from __future__ import annotations

import gc
from pathlib import Path


def private_mb() -> float:
    """Private, written pages of this process in MiB: no shared library, no shared store.

    Raises:
        OSError: not on Linux.
    """
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise OSError("no Private_Dirty in /proc/self/smaps_rollup")
