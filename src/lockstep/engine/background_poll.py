# SPDX-License-Identifier: Apache-2.0
"""Looks after the other workers while the worker in the driver's process computes.

The driver's thread is busy then, and may wait inside a collective for a worker that is stopped:
nobody else would notice.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.engine.pending_call import WATCH_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("lockstep.recovery")


@contextmanager
def looking_after(look: Callable[[], None]) -> Iterator[None]:
    """Inside, `look` is called every `WATCH_S` by another thread, which has ended afterwards."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(WATCH_S):
            try:
                look()
            except Exception:
                _log.exception("the other workers cannot be looked after any more")
                return

    thread = threading.Thread(target=watch, name="lockstep-background-poll", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
