# SPDX-License-Identifier: Apache-2.0
"""Asks whether a worker's process is stopped, and whether another machine answers at all."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Final

import ray
from lockstep.engine.cluster import this_node

if TYPE_CHECKING:
    from lockstep.engine.worker_handle import WorkerHandle

_CONNECT_S: Final = 0.3

# No file descriptor, memory or port is left to ask with, which says nothing of the other machine.
_OF_THIS_PROCESS: Final = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
}


def process_state(handle: WorkerHandle) -> str:
    """What the operating system says of a process here: "T" is stopped; "" if it cannot tell."""
    if not handle.pid or not handle.is_here:
        return ""
    try:
        with open(f"/proc/{handle.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_node_reachable(node_id: str) -> bool:
    """Whether the machine of a node can be reached, whatever its processes do.

    Asked is the port of its node's own process: the operating system answers, also while that
    process is busy. Ray itself gives a node half a minute and more.
    """
    if node_id == this_node():
        return True
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return False
    return is_host_reachable((node["NodeManagerAddress"], node["NodeManagerPort"]))


def is_host_reachable(address: tuple[str, int]) -> bool:
    """Whether the machine at (host, port) answers a connection, with a refusal perhaps."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True  # the machine answers that no process listens: Ray will tell of it
    except OSError as error:
        return error.errno in _OF_THIS_PROCESS
    return True
