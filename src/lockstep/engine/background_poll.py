# SPDX-License-Identifier: Apache-2.0
"""Polls the workers in actors while the worker in the driver's process computes.

The driver's main thread is busy then, and may wait in a collective for a worker that is stopped,
which only another thread can notice.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.engine.pending_call import POLL_EVERY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("lockstep.recovery")


@contextmanager
def poll_in_background(poll: Callable[[], None]) -> Iterator[None]:
    """Inside, a second thread calls `poll` every `POLL_EVERY_S`; the exit joins the thread."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(POLL_EVERY_S):
            try:
                poll()
            except Exception:
                _log.exception("the other workers cannot be looked after any more")
                return

    thread = threading.Thread(target=run, name="lockstep-background-poll", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
