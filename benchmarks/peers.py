# SPDX-License-Identifier: Apache-2.0
"""Where the other frameworks are installed, if they are: an interpreter of their own.

`make bench` puts them into `build/peers`. Where that failed, or nobody asked for it, their rows
say so instead of being left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

PEERS = Path(__file__).resolve().parents[1] / "build" / "peers" / "bin" / "python"
VARIABLE = "BENCHMARK_PEERS_PYTHON"
"""Another interpreter that has them."""


@lru_cache
def interpreter_with(module: str) -> str | None:
    """An interpreter that can import `module` and lockstep; None where there is none."""
    candidates = [sys.executable, os.environ.get(VARIABLE, str(PEERS))]
    for candidate in candidates:
        if Path(candidate).is_file() and _imports(candidate, module):
            return candidate
    return None


def _imports(interpreter: str, module: str) -> bool:
    tried = subprocess.run(
        [interpreter, "-c", f"import lockstep, {module}"], capture_output=True, check=False
    )
    return tried.returncode == 0
