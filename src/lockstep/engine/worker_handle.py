# SPDX-License-Identifier: Apache-2.0
"""One worker as the driver knows it, whatever its rank is at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.engine.cluster import this_node

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from lockstep.engine.worker_actor import WorkerActor
    from lockstep.worker import Worker


@dataclass(eq=False)
class WorkerHandle:
    """A worker, which keeps its number while ranks change hands.

    Attributes:
        number: counts the workers of a trainer, for people.
        node: the node that it lives on.
        local_rank: its place among the workers there, from its start on.
        actor: its Ray actor; None for the worker in the driver's process.
        worker: the worker in the driver's process.
        bundle: its bundle in the workers' placement group.
        pid: its process; 0 until it has started.
    """

    number: int
    node: str
    local_rank: int
    actor: ActorProxy[WorkerActor] | None = None
    worker: Worker | None = None
    bundle: int | None = None
    pid: int = 0

    def __str__(self) -> str:
        where = f"pid {self.pid}" if self.pid else "not started"
        return f"worker {self.number} ({where}, node {self.node[:8]})"

    @property
    def is_here(self) -> bool:
        """Its process runs on the driver's machine."""
        return self.node == this_node()

    def request_leave(self) -> None:
        """Ask the worker to leave the call that runs before its next batch. Does not wait."""
        if self.worker is not None:
            self.worker.request_leave()
        elif self.actor is not None:
            self.actor.request_leave.remote()

    def break_group(self, generation: int) -> None:
        """End the worker's waits in the group of `generation`. Does not wait."""
        if self.worker is not None:
            self.worker.break_group(generation)
        elif self.actor is not None:
            self.actor.break_group.remote(generation)
