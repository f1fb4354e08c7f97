# SPDX-License-Identifier: Apache-2.0
"""Delays Ctrl-C in a process that trains until a begun optimizer step is committed.

Once an optimizer has changed weights, the open step can be neither undone nor repeated until it is
committed. The same holds of an epoch's end, once a scheduler has stepped.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.worker import Worker


@contextmanager
def sigint_after_step(worker: Worker) -> Iterator[None]:
    """Inside, a Ctrl-C during an optimizer's step takes effect when the step is committed or fails,
    and one during an epoch's end before the next batch, or when the call ends.

    A second Ctrl-C takes effect at once. Has no effect outside of the main thread, for Python
    delivers signals in the main thread, and where the program ignores SIGINT.
    """
    previous_handler: Any = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(previous_handler):
        yield
        return
    pending: list[Any] = []

    def on_sigint(number: int, frame: Any) -> None:
        if worker.has_begun_to_step and not pending:
            pending.append(frame)
        else:
            previous_handler(number, frame)

    def take_effect() -> None:
        if pending:
            previous_handler(signal.SIGINT, pending.pop())

    signal.signal(signal.SIGINT, on_sigint)
    worker.before_next_batch = take_effect
    try:
        yield
    finally:
        worker.before_next_batch = None
        if signal.getsignal(signal.SIGINT) is on_sigint:  # else the program has set another one
            signal.signal(signal.SIGINT, previous_handler)
        # Also where the step failed: its error is then the context of KeyboardInterrupt.
        take_effect()
