# SPDX-License-Identifier: Apache-2.0
"""`PollingClock`: the time during which the driver has watched its workers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_TICK_S: Final = 1.0
"""Two polls are some tenths of a second apart, while nothing in the driver takes long."""


class PollingClock:
    """A clock that stands still while the driver does not poll.

    A callback may take minutes, or wait at a breakpoint, and Ctrl-Z stops the whole driver. What it
    knows of its workers is old then: of that time it cannot say that no worker has made a step, nor
    that one has not answered. So hangs are measured by this clock.

    Args:
        read: reads the time, in seconds.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._polled_at: float | None = None
        self._seconds = 0.0

    def tick(self) -> float:
        """Call at each poll: the seconds until now in which the driver has watched."""
        now = self._read()
        if self._polled_at is not None:
            self._seconds += min(now - self._polled_at, _LONGEST_TICK_S)
        self._polled_at = now
        return self._seconds
