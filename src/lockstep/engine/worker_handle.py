# SPDX-License-Identifier: Apache-2.0
"""`WorkerHandle`: the driver's handle of one worker, in an actor or in the driver's process."""

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
    """A worker's process, whose number stays while its rank may change.

    Attributes:
        number: the worker's number in messages; a trainer counts its workers from 0.
        node: the id of its Ray node.
        local_rank: its index among the workers on the node at its start.
        actor: its Ray actor; None for the worker in the driver's process.
        worker: the worker in the driver's process; None for a worker in an actor.
        bundle: the index of its bundle in the workers' placement group.
        pid: its process id; 0 until it has started.
        name: the name of its actor, by which other workers find it; "" until it has started.
    """

    number: int
    node: str
    local_rank: int
    actor: ActorProxy[WorkerActor] | None = None
    worker: Worker | None = None
    bundle: int | None = None
    pid: int = 0
    name: str = ""

    def __str__(self) -> str:
        where = f"pid {self.pid}" if self.pid else "not started"
        return f"worker {self.number} ({where}, node {self.node[:8]})"

    @property
    def is_here(self) -> bool:
        """Whether the worker's process runs on the driver's machine."""
        return self.node == this_node()

    def request_leave(self) -> None:
        """Ask the worker to leave its running call before the next batch. Does not block."""
        if self.worker is not None:
            self.worker.request_leave()
        elif self.actor is not None:
            self.actor.request_leave.remote()

    def break_group(self, generation: int) -> None:
        """End the worker's waits in the group of `generation`. Does not block."""
        if self.worker is not None:
            self.worker.break_group(generation)
        elif self.actor is not None:
            self.actor.break_group.remote(generation)
