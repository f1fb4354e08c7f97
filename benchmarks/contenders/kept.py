# SPDX-License-Identifier: Apache-2.0
"""In a worker: how long the part of a step takes that is there only for a worker's death."""

from __future__ import annotations

import time
from typing import Any

from lockstep.worker.rollback import Rollback

_SPENT = [0.0]


def watch() -> None:
    """Add up the seconds in which a worker keeps what a step is about to change."""
    for name in ("keep", "settle"):
        setattr(Rollback, name, _timed(getattr(Rollback, name)))


def spent() -> float:
    """Seconds since the last call of this function."""
    seconds, _SPENT[0] = _SPENT[0], 0.0
    return seconds


def _timed(method: Any) -> Any:
    def timed(self: Rollback, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *args)
        finally:
            _SPENT[0] += time.perf_counter() - start

    return timed
