# SPDX-License-Identifier: Apache-2.0
"""Timers of blocks of code, with means over a window of the latest runs."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from lockstep.errors import WrongUseError


class TimerStat:
    """Times a block of code, over a window of the latest runs. Not for several threads.

    Args:
        window_size: the number of latest samples over which `mean` and the other statistics go.

    Attributes:
        count: the number of samples so far.

    All times are in seconds; without samples, `mean`, `median` and `max` are NaN.
    """

    def __init__(self, window_size: int = 10) -> None:
        self._window_size = window_size
        self.reset()

    def reset(self) -> None:
        self._samples: deque[float] = deque(maxlen=self._window_size)
        self._units_processed: deque[float] = deque(maxlen=self._window_size)
        self._start_time: float | None = None
        self.count = 0

    def __enter__(self) -> TimerStat:
        if self._start_time is not None:
            raise WrongUseError(
                "this timer is already running",
                expected="one `with` block of a timer at a time",
                cause="a block was entered inside itself, or from a second thread",
                fix="give the inner block its own key: `timers.record('inner')`",
            )
        self._start_time = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._start_time is not None:  # None: `reset` was called inside the block
            self.push(time.perf_counter() - self._start_time)
        self._start_time = None

    def push(self, time_delta: float) -> None:
        """Add one sample, in seconds."""
        self._samples.append(time_delta)
        self.count += 1

    def push_units_processed(self, n: float) -> None:
        """Say how many units (samples, tokens) the latest run processed."""
        self._units_processed.append(n)

    def has_units_processed(self) -> bool:
        return len(self._units_processed) > 0

    @property
    def mean(self) -> float:
        return float(np.mean(self._samples)) if self._samples else math.nan

    @property
    def median(self) -> float:
        return float(np.median(self._samples)) if self._samples else math.nan

    @property
    def sum(self) -> float:
        return float(np.sum(self._samples))

    @property
    def max(self) -> float:
        return float(np.max(self._samples)) if self._samples else math.nan

    @property
    def first(self) -> float | None:
        """The oldest sample of the window."""
        return self._samples[0] if self._samples else None

    @property
    def last(self) -> float | None:
        """The newest sample."""
        return self._samples[-1] if self._samples else None

    @property
    def size(self) -> int:
        """How many samples the window holds."""
        return len(self._samples)

    @property
    def mean_units_processed(self) -> float:
        return float(np.mean(self._units_processed)) if self._units_processed else math.nan

    @property
    def mean_throughput(self) -> float:
        """Units per second over the window; 0 if no time was spent."""
        seconds = self.sum
        return float(np.sum(self._units_processed)) / seconds if seconds else 0.0


class TimerCollection:
    """One `TimerStat` per key; while disabled, recording costs and keeps nothing."""

    def __init__(self) -> None:
        self._timers: defaultdict[str, TimerStat] = defaultdict(TimerStat)
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def reset(self) -> None:
        for timer in self._timers.values():
            timer.reset()

    def record(self, key: str) -> AbstractContextManager[Any]:
        """A context manager that times its block under `key`."""
        return self._timers[key] if self._enabled else nullcontext()

    def stats(self, mean: bool = True, last: bool = False) -> dict[str, Any]:
        """``mean_{key}_s`` and ``last_{key}_s`` in seconds, for keys that have samples."""
        aggregates: dict[str, Any] = {}
        for key, timer in self._timers.items():
            if timer.count > 0:
                if mean:
                    aggregates[f"mean_{key}_s"] = timer.mean
                if last:
                    aggregates[f"last_{key}_s"] = timer.last
        return aggregates
