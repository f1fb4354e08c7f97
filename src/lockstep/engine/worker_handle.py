# SPDX-License-Identifier: Apache-2.0
"""One worker as the driver knows it, whatever its rank is at the moment."""

from __future__ import annotations

import errno
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import ray
from lockstep.engine.actor_failures import end_actor

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from lockstep.engine.worker_actor import WorkerActor
    from lockstep.worker import Worker

_CONNECT_S: Final = 0.3

# No file descriptor, memory or port is left to ask with, which says nothing of the other machine.
_OF_THIS_PROCESS: Final = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
}


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

    def dismiss(self) -> None:
        """Ask the worker to leave the call that runs before its next batch. Does not wait."""
        if self.worker is not None:
            self.worker.dismiss()
        elif self.actor is not None:
            self.actor.dismiss.remote()

    def break_group(self, generation: int) -> None:
        """End the worker's waits in the group of `generation`. Does not wait."""
        if self.worker is not None:
            self.worker.break_group(generation)
        elif self.actor is not None:
            self.actor.break_group.remote(generation)


def kill(handle: WorkerHandle, others: list[WorkerHandle]) -> None:
    """End a process at once, also one that is stopped or does not answer.

    `ray.kill` asks the process first, and lets one that was stopped live on for seconds, in
    which its open sockets keep its peers waiting (measured: 5 s). A signal does not ask.

    Args:
        others: workers, of which one on the same node sends the signal.
    """
    if handle.actor is None:
        return
    if handle.pid and handle.is_here:
        with suppress(ProcessLookupError):
            os.kill(handle.pid, signal.SIGKILL)
    elif handle.pid:
        # One of them: a number that was signalled twice may be another process by then.
        on_its_node = (each for each in others if each.node == handle.node and each is not handle)
        for neighbour in on_its_node:
            if neighbour.actor is not None:
                neighbour.actor.kill_process.remote(handle.pid)
                break
    end_actor(handle.actor)


def process_state(handle: WorkerHandle) -> str:
    """What the operating system says of a process here: "T" is stopped; "" if it cannot tell."""
    if not handle.pid or not handle.is_here:
        return ""
    try:
        with open(f"/proc/{handle.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def host_answers(node_id: str) -> bool:
    """Whether the machine of a node can be reached, whatever its processes do.

    Asked is the port of its node's own process: the operating system answers, also while that
    process is busy. Ray itself gives a node half a minute and more.
    """
    if node_id == this_node():
        return True
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return False
    return is_reached((node["NodeManagerAddress"], node["NodeManagerPort"]))


def is_reached(address: tuple[str, int]) -> bool:
    """Whether the machine at (host, port) answers a connection, with a refusal perhaps."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True  # the machine answers that no process listens: Ray will tell of it
    except OSError as error:
        return error.errno in _OF_THIS_PROCESS
    return True


def this_node() -> str:
    """The node that this process runs on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node
