# SPDX-License-Identifier: Apache-2.0
"""`CheckpointWriter`: writes checkpoints while training goes on.

A worker copies its state between two steps; the driver fetches the copy and writes it in a second
thread. Training waits for the copy alone.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lockstep.errors import CheckpointError, CheckpointWriteError
from lockstep.trainer.preemption import SigtermDeferral
from lockstep.worker import CheckpointOnDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from lockstep.engine import Engine
    from lockstep.worker import Snapshot

_log = logging.getLogger("lockstep.checkpoint")

_AFTER_AN_ERROR_S: Final = 2.0
"""How long to wait for each answer of a worker that may not answer any more."""

_LOOK_EVERY_S: Final = 0.2

_MOST_WRITTEN: Final = 8
"""Checkpoints that are remembered; the folder may hold fewer."""


class _Failure(NamedTuple):
    """Why the checkpoint of a step is missing; that of this step or a later one makes up for it."""

    step: int
    error: Exception


class CheckpointWriter:
    """Takes the workers' snapshots and writes one at a time; a `SnapshotKeeper`.

    A slow disk must neither delay training nor let copies fill the memory: of the snapshots that
    wait only the latest is written.

    Args:
        write: writes a snapshot to the disk, and returns its path.
        engine: the engine whose workers make the snapshots.

    Attributes:
        latest_step: see `SnapshotKeeper`.
    """

    def __init__(self, write: Callable[[Snapshot], str], engine: Engine) -> None:
        self._write = write
        self._engine = engine
        self._writing = threading.Lock()
        self._is_paused = False
        self._written: list[CheckpointOnDisk] = []
        self._preemption = SigtermDeferral()
        self._lock = threading.Lock()
        self._waiting: Snapshot | None = None
        self.latest_step = 0
        self._running: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._failure: _Failure | None = None
        self._fetcher = engine.start_snapshot_fetcher(self)

    @contextmanager
    def during_training(self, take_snapshot: Callable[[], Snapshot]) -> Iterator[None]:
        """Around a call that trains, delay the effect of SIGTERM until a checkpoint is written.

        Args:
            take_snapshot: takes the state of the run, after the call.
        """
        with self._preemption.defer_sigterm(self._fetcher.request):
            try:
                yield
            except Exception:
                # A callback may end the training by one: what rank 0 has copied is written.
                self._fetcher.finish(_AFTER_AN_ERROR_S)
                raise
            self._fetcher.finish()
            if self._preemption.is_pending:
                self.write_now(take_snapshot())

    def keep(self, snapshot: Snapshot) -> None:
        """Write `snapshot` in the second thread; if SIGTERM is pending, wait for it."""
        self._submit(snapshot)
        self._end_by_sigterm(snapshot.step)

    def write_now(self, snapshot: Snapshot) -> None:
        """Write `snapshot` in this thread, of a state that is no copy, and then obey SIGTERM.

        Ctrl-C ends the write. A second thread would go on, beside a next call that may change the
        very tensors that are written.
        """
        self.wait()
        self.latest_step = snapshot.step
        with self._writing:
            self._write_one(snapshot)
        self._end_by_sigterm(snapshot.step)

    def _end_by_sigterm(self, step: int) -> None:
        if self._preemption.is_pending:
            _log.warning("SIGTERM: ending with the checkpoint of step %d", step)
            self.wait()  # a failure is kept: where the program handles SIGTERM, `result` raises it
            self._preemption.take_effect()

    @property
    def written(self) -> Sequence[CheckpointOnDisk]:
        """See `SnapshotKeeper`."""
        return [each for each in self._written if os.path.exists(each.path)]

    @contextmanager
    def keep_written(self) -> Iterator[None]:
        """See `SnapshotKeeper`."""
        with self._writing:
            self._is_paused = True
            try:
                yield
            finally:
                self._is_paused = False

    def finish_writing(self, within_s: float) -> None:
        """See `SnapshotKeeper`."""
        # Inside of `keep_written` this would wait for its own end.
        if self._running is not None and not self._is_paused:
            wait([self._running], within_s)

    def go_on_from(self, step: int) -> None:
        """Drop snapshots that are not written yet, and failures: the run has left their steps.

        Waits for one that is being written.

        Args:
            step: that of the state that was loaded.
        """
        self._fetcher.drop()
        self.latest_step = step
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.give_back()
        self.finish()

    def note_failure(self, error: Exception) -> None:
        """Note that a checkpoint was lost on its way here; that of a later copy makes up for it."""
        self._note(_Failure(self.latest_step + 1, error))

    def _note(self, failure: _Failure) -> None:
        _log.error("a checkpoint could not be written: %s", failure.error)
        with self._lock:
            self._failure = failure

    def _submit(self, snapshot: Snapshot) -> None:
        self.latest_step = snapshot.step
        with self._lock:
            left_out, self._waiting = self._waiting, snapshot
        if left_out is not None:
            _log.info("step %d: no checkpoint, the disk is slower than they come", left_out.step)
            left_out.give_back()
        # Python waits for an executor's threads when the program ends, also after an error.
        self._executor = self._executor or ThreadPoolExecutor(1, "lockstep-checkpoint")
        # Also where one was left out: that one may have no job, after Ctrl-C in here or an error.
        try:
            self._running = self._executor.submit(self._write_latest)
        except RuntimeError as error:  # the system has no thread left; `wait` writes the snapshot
            self._note(_Failure(snapshot.step, error))

    def _write_latest(self) -> None:
        with self._writing:
            with self._lock:
                snapshot, self._waiting = self._waiting, None
            if snapshot is not None and not self._is_written(snapshot):
                self._write_one(snapshot)

    def _write_one(self, snapshot: Snapshot) -> None:
        step = snapshot.step
        try:
            written = CheckpointOnDisk(step, snapshot.call, self._write(snapshot))
            others = [each for each in self._written if each.path != written.path]
            self._written = [*others[-_MOST_WRITTEN:], written]
        # No error may be lost in the second thread: `finish` returns it to the caller.
        except Exception as error:
            self._note(_Failure(step, error))
        else:
            with self._lock:
                if self._failure is not None and self._failure.step <= step:
                    self._failure = None
        finally:
            snapshot.give_back()

    def _is_written(self, snapshot: Snapshot) -> bool:
        """Whether a recovery has led to the same step again, in the same call."""
        # Between calls there is no call that would tell it from another state of that step.
        name = snapshot.step, snapshot.call
        return snapshot.call >= 0 and name in {(each.step, each.call) for each in self.written}

    def wait(self) -> None:
        """Wait for all writes; a failure is kept for `finish`."""
        # Kept until the next one: after Ctrl-C in here `finish_writing` still knows it.
        if self._running is not None:
            while not wait([self._running], _LOOK_EVERY_S).done:
                self._engine.end_stopped_workers()  # they may be writing their parts
            self._running.result()
        self._write_latest()  # of a snapshot that has no job

    def finish(self) -> CheckpointWriteError | None:
        """Wait for all writes; return the error of the latest checkpoint, if it failed, once."""
        self.wait()
        with self._lock:
            failure, self._failure = self._failure, None
        return None if failure is None else _as_write_error(failure.error)

    def result(self, result: Any) -> Any:
        """Wait for all writes of a call, and return the call's `result`.

        Raises:
            CheckpointWriteError: the latest checkpoint could not be written.
        """
        error = self.finish()
        if error is not None:
            error.result = result
            error.add_note(
                "Training is not affected: the trainer can go on, and what this call would have"
                " returned is in the `result` of this error."
            )
            raise error
        return result

    def close(self, *, raises: bool) -> None:
        """`finish`, and end the second thread; without `raises` a failure is only logged.

        Raises:
            CheckpointWriteError: the latest checkpoint could not be written.
        """
        error = self.finish()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        if error is not None and raises:
            raise error


def _as_write_error(failure: Exception) -> CheckpointWriteError:
    if isinstance(failure, CheckpointWriteError):
        return failure
    details = failure.details if isinstance(failure, CheckpointError) else {}
    error = CheckpointWriteError(
        "a checkpoint could not be written",
        got=getattr(failure, "what", None) or f"{type(failure).__name__}: {failure}",
        cause=details.get("cause"),
        fix=details.get("fix"),
    )
    error.__cause__ = failure
    return error
