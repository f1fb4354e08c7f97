# SPDX-License-Identifier: Apache-2.0
"""`RendezvousStore`: the TCP store of a rendezvous, hosted by the driver so that any rank may
die."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

from lockstep.worker import arrival_key

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOPBACK = "127.0.0.1"


class RendezvousStore:
    """A TCP store on a socket that this class binds itself, to one address.

    Rejected: picking a free port and letting the store bind it later, for another process may take
    the port in between; and a store that listens on every interface, for every host that reaches
    the machine could then reach the store.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        listener = socket.create_server((host, 0), backlog=2048)
        self.host = host
        self.port: int = listener.getsockname()[1]
        # The store owns the descriptor from here on and closes it with itself.
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def have_arrived(self, ranks: Iterable[int]) -> bool:
        """Whether all of `ranks` have arrived at the rendezvous; never blocks."""
        assert self._store is not None
        return bool(self._store.check([arrival_key(rank) for rank in ranks]))

    def close(self) -> None:
        self._store = None
