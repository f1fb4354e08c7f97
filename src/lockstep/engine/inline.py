# SPDX-License-Identifier: Apache-2.0
"""One worker in this process: no Ray, no process group; breakpoints work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lockstep.engine.base import PoolStatus
from lockstep.engine.interrupted_calls import between_steps, no_way_back, warn_of_cut_short_step
from lockstep.worker import Worker, add_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.engine.base import SnapshotFetcher, SnapshotKeeper, Watch
    from lockstep.operator import TrainingOperator
    from lockstep.worker import WorkerSpec


class InlineEngine:
    """See `Engine`. Exceptions are raised as they are: they are the user's own already."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.ended: BaseException | None = None
        self.left: BaseException | None = None
        self._left_method = ""
        self._generation = 0
        self._worker = Worker(spec, rank=0, local_rank=0)
        self.started = [self._run("start", None)]

    def call(
        self,
        method: str,
        *args: Any,
        watch: Watch | None = None,
        retries: int = 0,
    ) -> list[Any]:
        self._worker.on_commit = every(0.1, watch, self._worker)
        try:
            return [self._run(method, *args)]
        finally:
            self._worker.on_commit = None

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return self._run(method, *args)

    def _run(self, method: str, *args: Any) -> Any:
        try:
            with between_steps(self._worker):
                return getattr(self._worker, method)(*args)
        except BaseException as error:
            add_rank(error, 0)
            if method in ("train", "validate"):
                self.left, self._left_method = error, method
            elif method == "start":
                self.ended = error
                self.close(force=True)
            raise

    def settle(self) -> None:
        cause = self.left
        if cause is None:
            return
        survivor = self._worker.go_back(self._left_method)
        if survivor.point is None:
            self.ended = no_way_back(cause)
            self.close(force=True)
        elif survivor.is_cut_short:
            warn_of_cut_short_step(survivor.point[0], cause)
        self._generation += 1
        self.left = None

    def bring_snapshots(self, to: SnapshotKeeper) -> SnapshotFetcher:
        self._worker.snapshots.give = to.keep
        return self._worker.snapshots

    def local_operator(self) -> TrainingOperator | None:
        return self._worker.operator

    def cut_anew(self, num_shards: int) -> None:
        """The worker knows it from the state."""

    def roster(self) -> PoolStatus:
        return PoolStatus(workers=1, generation=self._generation)

    def close(self, *, force: bool) -> None:
        self._worker.stop()


def every(seconds: float, watch: Watch | None, worker: Worker) -> Callable[[], None] | None:
    """`watch(worker.progress())`, at most once in `seconds`."""
    if watch is None:
        return None
    latest, since = time.monotonic(), 0

    def look() -> None:
        nonlocal latest, since
        now = time.monotonic()
        if now - latest >= seconds:
            latest = now
            # Of a worker with peers elsewhere the rows are a part.
            rows = {"rows": [worker.step_rows(since)]} if worker.spec.num_workers == 1 else {}
            since = watch({**worker.progress(), **rows})

    return look
