# SPDX-License-Identifier: Apache-2.0
"""Writes one checkpoint at a time, in a thread of its own, while training goes on."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from lockstep.worker import Snapshot

_log = logging.getLogger("lockstep.checkpoint")


class BackgroundWriter:
    """Writes what it is given, the latest first of all.

    A disk that is slower than checkpoints are due must not hold up training, nor memory fill with
    copies: of those that wait only the latest is written.

    Args:
        write: writes one to the disk.
    """

    def __init__(self, write: Callable[[Snapshot], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: Snapshot | None = None
        self._running: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._failure: Exception | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Write `snapshot` soon."""
        with self._lock:
            left_out, self._waiting = self._waiting, snapshot
        if left_out is not None:
            _log.info("step %d: no checkpoint, the disk is slower than they come", left_out.step)
            left_out.give_back()
            return
        # The executor's threads are waited for when the program ends, whatever ends it.
        self._executor = self._executor or ThreadPoolExecutor(1, "lockstep-checkpoint")
        self._running = self._executor.submit(self._write_latest)

    def _write_latest(self) -> None:
        with self._lock:
            snapshot, self._waiting = self._waiting, None
        if snapshot is None:
            return
        try:
            self._write(snapshot)
        # Whatever it is, it must not be lost in this thread: `finish` hands it over.
        except Exception as error:
            self.failed(error)
        else:
            self._failure = None
        finally:
            snapshot.give_back()

    def failed(self, error: Exception) -> None:
        """A checkpoint is not there. Only the next one that is makes up for it."""
        _log.error("a checkpoint could not be written: %s", error)
        self._failure = error

    def finish(self) -> Exception | None:
        """Wait until nothing waits; why the latest checkpoint is not there, once."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> Exception | None:
        """`finish`, and end the thread."""
        failure = self.finish()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        return failure
