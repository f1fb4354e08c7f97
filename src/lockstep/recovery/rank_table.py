# SPDX-License-Identifier: Apache-2.0
"""`RankTable`: assigns workers to the ranks of the next generation after a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.rank_assignment import group_by_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.recovery.lost_worker import LostWorker


class RankTable:
    """Assigns workers to the ranks of the next generation of the group.

    Attributes:
        lost_workers: the lost workers, in the order of their loss.
        admits_spares: False once spares have failed to join: the next attempt goes without them.
    """

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self._by_rank: list[WorkerHandle | None] = list(members)
        self.lost_workers: list[LostWorker] = []
        self.admits_spares = True

    @property
    def num_living(self) -> int:
        """The number of workers that still have a rank."""
        return sum(worker is not None for worker in self._by_rank)

    def mark_lost(self, lost: LostWorker) -> None:
        """Note a lost worker, and free its rank, if it had one."""
        self.lost_workers.append(lost)
        if lost.worker in self._by_rank:
            self._by_rank[self._by_rank.index(lost.worker)] = None

    def assign_ranks(self, spares: Sequence[WorkerHandle], num_workers: int) -> list[WorkerHandle]:
        """Give free ranks to spares, up to `num_workers` members; return the members by rank."""
        ready = list(spares)
        self._by_rank += [None] * (num_workers - len(self._by_rank))
        for rank, worker in enumerate(self._by_rank):
            if worker is None and ready:
                self._by_rank[rank] = ready.pop(0)
        members = [worker for worker in self._by_rank if worker is not None]
        # A spare on another host goes to the ranks of that host. No bit of the result depends on
        # which process computes a shard, and rank 0 in the driver's process stays first.
        return group_by_node(members, lambda worker: worker.node)
