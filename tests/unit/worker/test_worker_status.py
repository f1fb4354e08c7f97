# SPDX-License-Identifier: Apache-2.0
"""Where a thread stands, asked from another one."""

from __future__ import annotations

import threading
from types import FunctionType

from lockstep.worker.worker_status import status_of_thread


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
