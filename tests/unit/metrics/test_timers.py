# SPDX-License-Identifier: Apache-2.0
"""Timers have RaySGD's names and results, and say what is wrong when nested."""

from __future__ import annotations

import math

import pytest

from lockstep.errors import WrongUseError
from lockstep.metrics import TimerCollection, TimerStat


def test_window_and_count() -> None:
    timer = TimerStat(window_size=3)
    for seconds in (1.0, 2.0, 4.0, 9.0):
        timer.push(seconds)
        timer.push_units_processed(10)
    assert (timer.mean, timer.median, timer.sum, timer.max) == (5.0, 4.0, 15.0, 9.0)
    assert (timer.first, timer.last, timer.size, timer.count) == (2.0, 9.0, 3, 4)
    assert (timer.mean_units_processed, timer.mean_throughput) == (10.0, 2.0)
    assert timer.has_units_processed()


def test_without_samples() -> None:
    timer = TimerStat()
    for _ in range(2):
        assert math.isnan(timer.mean)
        assert math.isnan(timer.median)
        assert math.isnan(timer.max)
        assert math.isnan(timer.mean_units_processed)
        assert (timer.first, timer.last, timer.size, timer.count) == (None, None, 0, 0)
        assert (timer.sum, timer.mean_throughput) == (0.0, 0.0)
        timer.push(1.0)
        timer.push_units_processed(1)
        timer.reset()


def test_a_block_is_timed_even_when_it_raises() -> None:
    timer = TimerStat()
    with timer:
        pass
    with pytest.raises(KeyError), timer:
        raise KeyError
    assert timer.count == 2
    assert timer.last is not None
    assert timer.last >= 0.0


def test_nested_use_is_refused_and_the_outer_block_still_counts() -> None:
    timer = TimerStat()
    with timer, pytest.raises(WrongUseError, match="already running"), timer:
        pass
    assert timer.count == 1


def test_collection() -> None:
    timers = TimerCollection()
    with timers.record("fwd"), timers.record("grad"):
        pass
    assert set(timers.stats()) == {"mean_fwd_s", "mean_grad_s"}
    assert set(timers.stats(mean=False, last=True)) == {"last_fwd_s", "last_grad_s"}
    timers.reset()
    assert timers.stats() == {}
    timers.disable()
    with timers.record("fwd"), timers.record("fwd"):
        pass
    assert timers.stats() == {}
    timers.enable()
    with timers.record("fwd"):
        pass
    assert set(timers.stats(last=True)) == {"mean_fwd_s", "last_fwd_s"}
