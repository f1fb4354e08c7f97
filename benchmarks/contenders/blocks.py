# SPDX-License-Identifier: Apache-2.0
"""Two ways to do the same, in the same processes, in neighbouring blocks: A B, B A, A B ..."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Pairs = dict[str, list[float]]


def interleaved(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    pairs: int,
    steps: int = 1,
    meet: Callable[[], object] = lambda: None,
) -> Pairs:
    """Seconds per call of each, one value a block of `steps` calls.

    Args:
        meet: before every block, outside its time: ranks enter it together.
    """
    times: Pairs = {"ours": [], "theirs": []}
    sides = (("ours", ours), ("theirs", theirs))
    for number in range(pairs):
        for name, call in sides if number % 2 == 0 else reversed(sides):
            meet()
            start = time.perf_counter()
            for _ in range(steps):
                call()
            times[name].append((time.perf_counter() - start) / steps)
    return times
