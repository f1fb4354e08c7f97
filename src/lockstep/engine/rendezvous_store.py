# SPDX-License-Identifier: Apache-2.0
"""`open_store`: the TCP store of a rendezvous, hosted by the driver so that any rank may die."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open a TCP store on a socket that this function binds itself, to one address.

    Rejected: picking a free port and letting the store bind it later, for another process may take
    the port in between; and a store that listens on every interface, for every host that reaches
    the machine could then reach the store.

    Returns:
        The store, which closes with the last reference to it.
    """
    listener = socket.create_server((host, 0), backlog=2048)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # The store owns the descriptor from here on and closes it with itself.
        master_listen_fd=listener.detach(),
    )
