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

# This process has no file descriptor, memory or port left: no sign that the other machine is down.
_OWN_RESOURCE_ERRORS: Final = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
}


def process_state(handle: WorkerHandle) -> str:
    """The state letter of a local worker's process in /proc ("T": stopped); "" if unknown."""
    if not handle.pid or not handle.is_here:
        return ""
    try:
        with open(f"/proc/{handle.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_node_reachable(node_id: str) -> bool:
    """Whether the machine of a Ray node answers, whatever its processes do.

    Connects to the raylet's port: the kernel accepts even if the raylet is busy. Ray itself takes
    half a minute and more to declare a node dead.
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
        return True  # the machine answers, and no process listens: Ray will report that
    except OSError as error:
        return error.errno in _OWN_RESOURCE_ERRORS
    return True
