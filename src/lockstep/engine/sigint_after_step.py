# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a process that trains: it waits for the end of an optimizer's step.

Until a step is committed, weights that an optimizer has changed cannot be taken back.
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
    """Inside, a Ctrl-C that comes in an optimizer's step has its effect when it is committed.

    Or when the step fails; and a second one at once. In another thread than the main one nothing
    changes, for Python delivers signals there; nor where the program ignores the signal.
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
    worker.on_boundary = take_effect
    try:
        yield
    finally:
        worker.on_boundary = None
        if signal.getsignal(signal.SIGINT) is on_sigint:  # else the program has set another one
            signal.signal(signal.SIGINT, previous_handler)
        take_effect()  # also where the step fails, whose error is the context then
