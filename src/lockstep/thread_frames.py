# SPDX-License-Identifier: Apache-2.0
"""The stack of another thread, while that thread runs."""

from __future__ import annotations

import sys
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import itemgetter
from types import FrameType
from typing import Any


def frames_of_thread(thread_id: int | None) -> list[FrameType]:
    """The frames of a thread at one moment, innermost first; empty if it has ended.

    The thread must not run while its frames are asked for their callers: of one that returns
    meanwhile, ``f_back`` was seen to give an object that is no frame (Python 3.11). So nothing in
    here is computed by Python's own interpreter, which would let other threads run: `list` asks
    iterators that are written in C, from ``sys._current_frames`` on.
    """
    innermost: Any = islice(map(itemgetter(thread_id), iter(sys._current_frames, None)), 1)
    callers: Any = accumulate(chain(innermost, repeat("f_back")), getattr)
    try:
        return list(takewhile(FrameType.__instancecheck__, callers))
    except KeyError:
        return []
