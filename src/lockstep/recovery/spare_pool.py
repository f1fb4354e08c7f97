# SPDX-License-Identifier: Apache-2.0
"""Workers that wait for a place, and replacements for those that are lost."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from lockstep.engine.placement_group import start_timeout_s
from lockstep.engine.spare_worker import Readiness
from lockstep.errors import NotEnoughResourcesError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_group import WorkerGroup
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.recovery.lost_workers import LostWorker
    from lockstep.recovery.watchdog import Watchdog

_log = logging.getLogger("lockstep.recovery")

_POLL_EVERY_S: Final = 0.1

_MAX_STARTS: Final = 5
"""Processes that may die in a bundle, one after the other, before one of them is ready."""


class SparePool:
    """The spares of a run: which are ready, and new ones for those that fail.

    Args:
        watchdog: knows which hosts answer.
    """

    def __init__(self, workers: WorkerGroup, watchdog: Watchdog) -> None:
        self._workers = workers
        self._watchdog = watchdog
        self._starts: Counter[int] = Counter()

    def ready_workers(self) -> list[WorkerHandle]:
        """Spares that have run their `setup`; one that failed is replaced."""
        ready: list[WorkerHandle] = []
        for spare in list(self._workers.spares):
            readiness = spare.readiness()
            if readiness is Readiness.FAILED:
                self._replace(spare.handle, spare.error)
            elif readiness is Readiness.READY:
                ready.append(spare.handle)
        return ready

    def reachable_workers(self) -> list[WorkerHandle]:
        """Ready spares; the host of one may have fallen silent together with a member's."""
        ready = self.ready_workers()
        silent = [worker for worker in ready if not self._watchdog.can_reach(worker)]
        for worker in silent:
            self._replace(worker, WorkerDiedError("its host does not answer"))
        return [worker for worker in ready if worker not in silent]

    def _replace(self, worker: WorkerHandle, error: BaseException | None) -> None:
        _log.warning("%s cannot take a place: %s", worker, error)
        self._workers.kill(worker)
        # A process that died may live elsewhere; a `setup` that raised will raise again.
        if worker.bundle is not None and isinstance(error, WorkerDiedError):
            self._starts[worker.bundle] += 1
            if self._starts[worker.bundle] <= _MAX_STARTS:
                self._workers.start_spare(worker.bundle, worker.local_rank)

    def start_replacements(self, lost_workers: Sequence[LostWorker]) -> None:
        """Start a worker for each that is lost; it will be a spare, or take a free rank."""
        for lost in (each.worker for each in lost_workers):
            taken = {worker.bundle for worker in self._workers.all_workers}
            if lost.bundle is not None and lost.bundle not in taken:
                self._workers.start_spare(lost.bundle, lost.local_rank)

    def wait_for_spares(self, wanted: int, *, have: int, min_workers: int) -> list[WorkerHandle]:
        """Wait until `wanted` spares are ready.

        Args:
            have: the workers that are left, for messages.
            min_workers: as the trainer's, for messages.

        Raises:
            NotEnoughResourcesError: they did not become ready in time.
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
            fix="a smaller min_workers, spare_workers, or a new trainer from the last checkpoint",
        )
