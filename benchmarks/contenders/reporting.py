# SPDX-License-Identifier: Apache-2.0
"""A contender's side of the harness."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def seconds_since_launch() -> float:
    """Since just before the harness started this program: interpreter and imports count.

    The monotonic clock is the machine's, so readings of two processes can be subtracted.
    """
    return time.monotonic() - float(os.environ["BENCHMARK_STARTED"])


def report(**values: Any) -> None:
    """Leave the result for the harness."""
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(values))
