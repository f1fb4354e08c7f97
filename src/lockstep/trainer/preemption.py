# SPDX-License-Identifier: Apache-2.0
"""SIGTERM while training: the machine is about to be taken away, and there is a moment left."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EXIT_STATUS: Final = 128 + signal.SIGTERM
"""As a shell reports the death by this signal."""


class PreemptionNotice:
    """Delays the effect of SIGTERM until a checkpoint is written.

    Attributes:
        is_pending: the signal has come, and has not had its effect yet.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._previous_handler: Any = signal.SIG_DFL

    @contextmanager
    def defer_sigterm(self, request: Callable[[], None]) -> Iterator[None]:
        """Inside, SIGTERM calls `request`; the code that writes the checkpoint calls `take_effect`.

        In another thread than the main one nothing changes, for Python delivers signals there;
        nor where the program ignores the signal.
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
            # The call has failed before anything could be saved: the signal is not forgotten.
            self.take_effect()

    def take_effect(self) -> None:
        """Do what SIGTERM would have done; nothing if it has not come.

        Raises:
            SystemExit: unless the program has a handler of its own. Unlike the death by the
                signal itself it lets what is open be closed, and the exit status is the same.
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
