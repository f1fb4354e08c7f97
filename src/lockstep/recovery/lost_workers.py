# SPDX-License-Identifier: Apache-2.0
"""Workers that a run has lost, and the ranks that the others have afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.engine.rank_assignment import group_by_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.errors import WorkerDiedError
    from lockstep.worker import WorkerStatus


@dataclass(frozen=True)
class LostWorker:
    """A worker that is gone.

    Attributes:
        worker: which one.
        rank: the rank that it had.
        shards: the shards of each global batch that it carried.
        died: why it is gone.
        last_seen: what it was doing when it answered last.
    """

    worker: WorkerHandle
    rank: int
    shards: range
    died: WorkerDiedError
    last_seen: WorkerStatus | None = None


class RankTable:
    """Which worker has which rank in the next generation of the group.

    Attributes:
        lost_workers: the workers that are gone, those that went last at the end.
    """

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self._by_rank: list[WorkerHandle | None] = list(members)
        self.lost_workers: list[LostWorker] = []

    @property
    def num_living(self) -> int:
        """Workers that still have a rank."""
        return sum(worker is not None for worker in self._by_rank)

    def mark_lost(self, lost: LostWorker) -> None:
        """A worker is gone; its rank is free, if it had one."""
        self.lost_workers.append(lost)
        if lost.worker in self._by_rank:
            self._by_rank[self._by_rank.index(lost.worker)] = None

    def assign_ranks(self, spares: Sequence[WorkerHandle], num_workers: int) -> list[WorkerHandle]:
        """Give free ranks, `num_workers` in all, to spares; the members afterwards, by rank."""
        ready = list(spares)
        self._by_rank += [None] * (num_workers - len(self._by_rank))
        for rank, worker in enumerate(self._by_rank):
            if worker is None and ready:
                self._by_rank[rank] = ready.pop(0)
        members = [worker for worker in self._by_rank if worker is not None]
        # A spare of another host belongs to the ranks of that host. Which process computes a
        # rank's shards changes no bit, and rank 0 in the driver's process stays the first one.
        return group_by_node(members, lambda worker: worker.node)
