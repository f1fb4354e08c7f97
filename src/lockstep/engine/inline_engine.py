# SPDX-License-Identifier: Apache-2.0
"""`InlineEngine`: one worker in this process, without Ray or a process group; breakpoints work."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from lockstep.engine.engine_protocol import PoolStatus
from lockstep.engine.rollback_errors import rollback_impossible_error, warn_of_cut_short_step
from lockstep.engine.sigint_after_step import sigint_after_step
from lockstep.engine.step_hooks_at_work import step_hooks_at_work
from lockstep.errors import WrongUseError
from lockstep.worker import (
    OnFailure,
    Worker,
    add_rank,
    predict,
    progress_of,
    rows_after,
    undo_without_peers,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.checkpoint import WrittenPart
    from lockstep.engine.engine_protocol import CallListener, SnapshotFetcher, SnapshotKeeper
    from lockstep.operator import TrainingOperator
    from lockstep.worker import LoopRequest, RemoteCall, WorkerSpec

R = TypeVar("R")

_PROGRESS_EVERY_S = 0.1

_one_run: Final = threading.RLock()
"""Held by the thread whose run computes: generators of random numbers and torch's deterministic
mode are the process's, and two runs at once would draw each other's numbers."""

_DRAWING: Final = (Worker.start, Worker.train, Worker.validate, predict, verify)
"""The calls that seed the generators and draw from them. All others answer at once."""

_PATIENCE_S: Final = 60.0
"""How long a run waits for another one's call. That may itself wait for this one, as training does
for a thread that feeds it with another trainer's predictions."""


class InlineEngine:
    """An `Engine`. It raises the worker's exceptions as they are, without pickling them."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.ended_by: BaseException | None = None
        self.interrupted_by: BaseException | None = None
        self._interrupted_loop: LoopRequest | None = None
        self._generation = 0
        self._worker = Worker(spec, rank=0, local_rank=0)
        try:
            self.start_reports = [self._perform(Worker.start.with_args(None))]
        except BaseException as error:
            self.end(error)
            raise

    def call(
        self,
        call: RemoteCall[Worker, R],
        *,
        listener: CallListener | None = None,
        retries: int = 0,
    ) -> list[R]:
        self._worker.on_commit = progress_reporter(self._worker, listener, _PROGRESS_EVERY_S)
        try:
            return [self._perform(call)]
        finally:
            self._worker.on_commit = None

    def call_rank(self, rank: int, call: RemoteCall[Worker, R]) -> R:
        return self._perform(call)

    def _perform(self, call: RemoteCall[Worker, R]) -> R:
        with _turn_of(call):  # outside: a call that got no turn has interrupted nothing
            try:
                with step_hooks_at_work(self._worker), sigint_after_step(self._worker):
                    return call.perform(self._worker)
            except BaseException as error:
                add_rank(error, 0)
                if call.contract.on_failure is OnFailure.RESUME:
                    self.interrupted_by = error
                    self._interrupted_loop = call.request
                raise

    def undo_interrupted_call(self) -> None:
        cause = self.interrupted_by
        if cause is None:
            return
        survivor = undo_without_peers(self._worker, self._interrupted_loop)
        if survivor.position is None:
            self.end(rollback_impossible_error(cause))
        elif survivor.is_cut_short:
            warn_of_cut_short_step(survivor.position.steps, cause)
        self._generation += 1
        self.interrupted_by = None

    def start_snapshot_fetcher(self, to: SnapshotKeeper) -> SnapshotFetcher:
        self._worker.snapshots.give = to.keep
        return self._worker.snapshots

    def write_parts(self, step: int, folder: str) -> list[WrittenPart] | None:
        raise AssertionError("one worker has the whole state")

    def end_stopped_workers(self) -> None:
        """Do nothing: the driver's process is the only one."""

    def local_operator(self) -> TrainingOperator | None:
        return self._worker.operator

    def set_num_shards(self, num_shards: int) -> None:
        """Does nothing: the worker reads the number from the state."""

    def status(self) -> PoolStatus:
        return PoolStatus(workers=1, generation=self._generation)

    def end(self, cause: BaseException) -> None:
        self.ended_by = cause
        self.close(force=True)

    def close(self, *, force: bool) -> None:
        self._worker.stop()


@contextmanager
def _turn_of(call: RemoteCall[Worker, object]) -> Iterator[None]:
    """Wait until no other run of this process computes, if `call` does.

    Raises:
        WrongUseError: another run has computed all the while.
    """
    if call.method not in _DRAWING:
        yield
        return
    if not _one_run.acquire(timeout=_PATIENCE_S):
        raise WrongUseError(
            "another trainer of this process computes in another thread",
            where=call.contract.name,
            got=f"its call has not returned for {_PATIENCE_S:.0f} s",
            cause="generators of random numbers are the process's: two runs at once would draw"
            " each other's numbers. Or that call waits for this one",
            fix="one after the other in one thread; or num_workers=2, with processes of its own",
        )
    try:
        yield
    finally:
        _one_run.release()


def progress_reporter(
    worker: Worker, listener: CallListener | None, every_s: float
) -> Callable[[], None] | None:
    """A function for a worker in this process to call after every step; None without a listener.

    It passes the worker's progress to `listener` at most once in `every_s` seconds.
    """
    if listener is None:
        return None
    latest = time.monotonic()

    def report() -> None:
        nonlocal latest
        now = time.monotonic()
        if now - latest < every_s:
            return
        latest, progress = now, progress_of(worker)
        # With peers in actors, `RayEngine` collects the rows of all workers instead.
        if worker.spec.num_workers == 1:
            progress = replace(progress, rows=[rows_after(worker, listener.rows_known)])
        listener.on_progress(progress)

    return report
