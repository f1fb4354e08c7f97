# SPDX-License-Identifier: Apache-2.0
"""`SigtermDeferral`: on SIGTERM during training, writes a checkpoint before the program ends."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EXIT_STATUS: Final = 128 + signal.SIGTERM
"""The exit status by which a shell reports a death by SIGTERM."""


class SigtermDeferral:
    """Delays the effect of SIGTERM until a checkpoint is written.

    Attributes:
        is_pending: the signal has come, and has not had its effect yet.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._previous_handler: Any = signal.SIG_DFL

    @contextmanager
    def defer_sigterm(self, request: Callable[[], None]) -> Iterator[None]:
        """Inside, SIGTERM calls `request`; the writer of the checkpoint then calls `take_effect`.

        Does nothing outside of the main thread, in which Python delivers signals, or where the
        program ignores the signal.
        """
        is_main = threading.current_thread() is threading.main_thread()
        previous_handler = signal.getsignal(signal.SIGTERM)
        if not is_main or previous_handler in (None, signal.SIG_IGN):
            yield
            return

        def on_sigterm(number: int, frame: Any) -> None:
            if self.is_pending:
                raise SystemExit(_EXIT_STATUS)  # the second signal does not wait
            self.is_pending = True
            request()

        self._previous_handler = previous_handler
        signal.signal(signal.SIGTERM, on_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous_handler)
            # Also after a call that failed before a checkpoint was written.
            self.take_effect()

    def take_effect(self) -> None:
        """Do what SIGTERM would have done, if it has come.

        Raises:
            SystemExit: unless the program has a handler of its own. The exit status is that of a
                death by the signal, but open files and connections are closed first.
        """
        if not self.is_pending:
            return
        self.is_pending = False
        # Ray's, set by `ray.init`, would end the program with another status.
        is_of_ray = getattr(self._previous_handler, "__module__", "").partition(".")[0] == "ray"
        if callable(self._previous_handler) and not is_of_ray:
            self._previous_handler(signal.SIGTERM, None)
        else:
            raise SystemExit(_EXIT_STATUS)
