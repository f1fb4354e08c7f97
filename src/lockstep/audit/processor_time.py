# SPDX-License-Identifier: Apache-2.0
"""How long the processors have worked for a rank and for the processes that it has started."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_SESSION: Final = 3
_TIMES: Final = slice(11, 15)
"""Places of a process's session, and of its user and system time and those of the children that it
has waited for, behind the name in its `stat` file (proc(5), whose fields 6 and 14 to 17 they are).
"""


def computed_in_session_s() -> float:
    """Seconds of all processes of this session; without /proc those of this process.

    Without the children that have ended, a rank that waits for one short child after another would
    not compute at all.

    The launcher gives each rank a session of its own. A rank that waits for a child that computes
    is no rank that hangs.
    """
    own, ticks = str(os.getsid(0)), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[_SESSION] == own:
            ticks += sum(map(int, fields[_TIMES]))
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else time.process_time()
