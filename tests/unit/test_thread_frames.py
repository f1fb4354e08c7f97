# SPDX-License-Identifier: Apache-2.0
"""A stack that another thread has at one moment, and not parts of several."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType

import pytest

from lockstep.thread_frames import frames_of_thread

DEPTH = 40
LOOKS = 3000


def even(left: int) -> int:
    return 0 if left == 0 else odd(left - 1)


def odd(left: int) -> int:
    return 0 if left == 0 else even(left - 1)


@pytest.fixture
def busy_thread() -> Iterator[int]:
    """Goes down and up all the time; threads take turns as often as Python lets them."""
    ends, before = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not ends.is_set():
            even(DEPTH)

    thread = threading.Thread(target=run, daemon=True)
    sys.setswitchinterval(1e-6)
    thread.start()
    assert thread.ident is not None
    yield thread.ident
    sys.setswitchinterval(before)
    ends.set()
    thread.join()


def is_of_one_moment(frames: list[FrameType]) -> bool:
    """The two functions have called each other in turn."""
    called = [frame for frame in frames if frame.f_code in (even.__code__, odd.__code__)]
    return all(one.f_code is not other.f_code for one, other in pairwise(called))


def test_the_frames_of_a_running_thread_belong_together(busy_thread: int) -> None:
    depths: set[int] = set()
    looks = 0
    while looks < LOOKS or len(depths) < 2:  # how often threads take turns is the system's choice
        frames = frames_of_thread(busy_thread)
        assert all(isinstance(frame, FrameType) for frame in frames)
        assert is_of_one_moment(frames)
        assert frames[-1].f_code.co_name == "_bootstrap"
        depths.add(len(frames))
        looks += 1


def test_they_are_what_the_thread_itself_sees() -> None:
    mine = frames_of_thread(threading.get_ident())
    seen = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
    assert mine[-len(seen) :] == seen


def test_a_thread_that_has_ended_has_none() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert frames_of_thread(thread.ident) == []
    assert frames_of_thread(None) == []
