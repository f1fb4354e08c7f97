# SPDX-License-Identifier: Apache-2.0
"""Where a thread stands, asked from another one."""

from __future__ import annotations

import threading
from types import FunctionType, SimpleNamespace
from typing import Any

from lockstep.worker.committed_counts import CommittedCounts
from lockstep.worker.report import LoopCounts
from lockstep.worker.worker_status import status_of, status_of_thread


def _waits(has_begun: threading.Event, may_go: threading.Event) -> None:
    has_begun.set()
    may_go.wait()


def test_a_frame_between_two_lines_has_no_line_number() -> None:
    """Python says None then; who looked after the run ended it with a TypeError of its own."""
    lineless = FunctionType(_waits.__code__.replace(co_linetable=b""), globals())
    has_begun, may_go = threading.Event(), threading.Event()
    thread = threading.Thread(target=lineless, args=(has_begun, may_go), daemon=True)
    thread.start()
    has_begun.wait()
    assert thread.ident is not None
    found = status_of_thread(thread.ident, 3, None, is_warm=True)
    may_go.set()
    thread.join()
    assert found.steps == 3
    assert f"{__file__}:{_waits.__code__.co_firstlineno} in _waits" in found.line


def test_counts_of_a_loop_that_is_over_are_not_those_of_the_next_one() -> None:
    """A status that comes before the next loop has begun still finds the one before."""
    counted = LoopCounts(8, {})
    before: Any = SimpleNamespace(
        committed=CommittedCounts(steps=2), own_steps=2, counted=counted, is_over=False
    )
    worker: Any = SimpleNamespace(loop_run=before, is_warm=True, is_built=False)
    assert status_of(worker, threading.get_ident()).counted is counted
    before.is_over = True
    assert status_of(worker, threading.get_ident()).counted is None
