# SPDX-License-Identifier: Apache-2.0
"""`SpareWorkers`: which spares are ready; new ones for those that failed or took a rank."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from lockstep.engine.placement_group import start_timeout_s
from lockstep.engine.spare_worker import Readiness
from lockstep.error_texts import LOAD_LAST
from lockstep.errors import NotEnoughResourcesError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_group import WorkerGroup
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.recovery.lost_worker import LostWorker
    from lockstep.recovery.watchdog import Watchdog

_log = logging.getLogger("lockstep.recovery")

_POLL_EVERY_S: Final = 0.1

_MAX_STARTS: Final = 5
"""Starts in one bundle whose process may die before it is ready."""


class SpareWorkers:
    """The spare workers of a run: which are ready, and new ones in the place of those that fail.

    Args:
        watchdog: knows which hosts answer.
    """

    def __init__(self, workers: WorkerGroup, watchdog: Watchdog) -> None:
        self._workers = workers
        self._watchdog = watchdog
        self._starts: Counter[int] = Counter()

    def ready_workers(self) -> list[WorkerHandle]:
        """Spares that have run their `setup`; replaces spares that failed."""
        ready: list[WorkerHandle] = []
        for spare in list(self._workers.spares):
            readiness = spare.readiness()
            if readiness is Readiness.FAILED:
                self._replace(spare.handle, spare.error)
            elif readiness is Readiness.READY:
                ready.append(spare.handle)
        return ready

    def reachable_workers(self) -> list[WorkerHandle]:
        """Ready spares on hosts that answer; a spare's host may fail together with a member's."""
        ready = self.ready_workers()
        silent = [worker for worker in ready if not self._watchdog.can_reach(worker)]
        for worker in silent:
            self._replace(worker, WorkerDiedError("its host does not answer"))
        return [worker for worker in ready if worker not in silent]

    def _replace(self, worker: WorkerHandle, error: BaseException | None) -> None:
        _log.warning("%s cannot take a place: %s", worker, error)
        self._workers.kill(worker)
        # A new process may outlive one that died; a `setup` that raised would raise again.
        if worker.bundle is not None and isinstance(error, WorkerDiedError):
            self._starts[worker.bundle] += 1
            if self._starts[worker.bundle] <= _MAX_STARTS:
                self._workers.start_spare(worker.bundle, worker.local_rank)

    def start_replacements(self, lost_workers: Sequence[LostWorker]) -> None:
        """Start a spare in the bundle of each worker that may be replaced, unless it is taken."""
        for lost in (each.worker for each in lost_workers if each.may_be_replaced):
            taken = {worker.bundle for worker in self._workers.all_workers}
            if lost.bundle is not None and lost.bundle not in taken:
                self._workers.start_spare(lost.bundle, lost.local_rank)

    def wait_for_spares(self, wanted: int, *, have: int, min_workers: int) -> list[WorkerHandle]:
        """Wait until `wanted` spares are ready.

        Args:
            have: the number of workers that are left, for messages.
            min_workers: the trainer's argument, for messages.

        Raises:
            NotEnoughResourcesError: the spares did not become ready in time.
        """
        patience_s = start_timeout_s()
        _log.warning(
            "%d workers are left, min_workers=%d: waiting for others to start", have, min_workers
        )
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            ready = self.reachable_workers()
            if len(ready) >= wanted:
                return ready
            if not self._workers.spares:
                break
            self._workers.pause(_POLL_EVERY_S)
        raise NotEnoughResourcesError(
            "too few workers are left",
            where=f"after waiting {patience_s:.0f} s for others",
            expected=f"min_workers={min_workers}",
            got=f"{have}",
            cause="the cluster has no room for replacements, or they could not start",
            fix=f"a smaller min_workers, or spare_workers; or {LOAD_LAST}",
        )
