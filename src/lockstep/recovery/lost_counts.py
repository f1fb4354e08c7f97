# SPDX-License-Identifier: Apache-2.0
"""What lost workers had counted in a call, so that its result counts every sample once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.data import shards_of
from lockstep.worker import lost_report

if TYPE_CHECKING:
    from lockstep.engine.ray import RayEngine
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.recovery.regrouping import Loss, Regrouped
    from lockstep.worker import LoopProgress, Report


class LostCounts:
    """Who carried which shards, generation by generation of one call.

    Args:
        engine: whose workers report.
        method: the call.

    Attributes:
        reports: one for each worker that was lost.
    """

    def __init__(self, engine: RayEngine, method: str) -> None:
        self._engine = engine
        self._method = method
        self.reports: list[Report] = []
        self._rosters: list[tuple[int, list[WorkerHandle]]] = [(0, list(engine.members))]

    def note(self, regrouped: Regrouped) -> None:
        """The group was formed anew in the middle of the call."""
        progress = regrouped.progress
        # A validation is done again from its beginning, by those that are there now.
        if self._method != "train" or progress is None:
            return
        if progress.steps <= 0:
            self.reports.clear()
            self._rosters = [(0, list(self._engine.members))]
            return
        for loss in regrouped.losses:
            self.reports.append(self._report(loss, progress))
        self._rosters.append((progress.steps, list(self._engine.members)))

    def _report(self, loss: Loss, progress: LoopProgress) -> Report:
        counted = None if loss.last_seen is None else loss.last_seen.counted
        segments = self._segments(loss.member, progress)
        samples: Any = 0
        if segments:
            samples = self._engine.call_rank(0, "samples_of", "train", segments)
        if samples is None:
            samples = 0 if counted is None else counted.samples
        return lost_report(samples, counted)

    def _segments(
        self, member: WorkerHandle, progress: LoopProgress
    ) -> list[tuple[range, int, int]]:
        """(shards, first step, number of steps) of each generation that `member` was in."""
        ends = [*(start for start, _ in self._rosters[1:]), progress.steps]
        num_shards = self._engine.spec.num_shards
        return [
            (
                shards_of(roster.index(member), len(roster), num_shards),
                progress.step + start,
                end - start,
            )
            for (start, roster), end in zip(self._rosters, ends, strict=True)
            if member in roster and end > start
        ]
