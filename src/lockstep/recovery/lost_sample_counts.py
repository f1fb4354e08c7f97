# SPDX-License-Identifier: Apache-2.0
"""Counts the samples that lost workers computed in a call, so that its result counts each once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.data import shards_of
from lockstep.worker import report_of_lost_worker, samples_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.engine.ray_engine import RayEngine
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.recovery.lost_worker import LostWorker
    from lockstep.recovery.regrouping import NewGeneration
    from lockstep.recovery.watchdog import Watchdog
    from lockstep.worker import LoopProgress, RemoteCall, Report, Worker

    Ask = Callable[[RemoteCall[Worker, int | None]], int | None]


class LostSampleCounts:
    """Knows which worker computed which shards in each generation of one call.

    Args:
        engine: the engine of the workers.
        watchdog: has what lost workers had counted.
        purpose: the purpose of the loop; None for a call that counts no samples.
        ask: asks the workers; returns None if none of them answers.

    Attributes:
        reports: a report in the name of each worker that was lost.
    """

    def __init__(
        self, engine: RayEngine, watchdog: Watchdog, purpose: str | None, ask: Ask
    ) -> None:
        self._engine = engine
        self._watchdog = watchdog
        self._purpose = purpose
        self._ask = ask
        self.reports: list[Report] = []
        self._generations: list[tuple[int, list[WorkerHandle]]] = []
        self._begin()

    def _begin(self) -> None:
        """Count from the beginning of the call."""
        self.reports.clear()
        self._generations = [(0, self._members())]
        self._watchdog.forget_counts()

    def _members(self) -> list[WorkerHandle]:
        return list(self._engine.workers.members)

    def record_losses(self, new_generation: NewGeneration) -> None:
        """Make the reports of workers that were lost before the call goes on in
        `new_generation`."""
        progress = new_generation.source.progress
        # The present members repeat a validation from its beginning.
        if self._purpose != "train" or progress is None:
            return
        if progress.steps <= 0:
            self._begin()
            return
        for each in new_generation.lost_workers:
            self.reports.append(self._report(each, progress))
        self._generations.append((progress.steps, self._members()))

    def _report(self, lost: LostWorker, progress: LoopProgress) -> Report:
        counted = self._watchdog.last_counts(lost.worker)
        segments = self._segments(lost.worker, progress)
        samples: int | None = 0
        if segments:
            samples = self._ask(samples_of.with_args("train", segments))
        if samples is None:
            samples = 0 if counted is None else counted.samples
        return report_of_lost_worker(samples, counted)

    def _segments(
        self, worker: WorkerHandle, progress: LoopProgress
    ) -> list[tuple[range, int, int]]:
        """(shards, first step, number of steps) of each generation that `worker` was in."""
        ends = [*(start for start, _ in self._generations[1:]), progress.steps]
        num_shards = self._engine.spec.num_shards
        return [
            (
                shards_of(members.index(worker), len(members), num_shards),
                progress.step + start,
                end - start,
            )
            for (start, members), end in zip(self._generations, ends, strict=True)
            if worker in members and end > start
        ]
