# SPDX-License-Identifier: Apache-2.0
"""A parameter server for ranks that are threads, and the training program on such ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from harness import outcomes
from lockstep.errors import PeerLostError
from lockstep.group import Group
from lockstep.sync import ParameterServer, ParameterServerSync, ServerAddress
from lockstep.sync.parameter_server.server_connection import connect_to_server
from ranks import programs
from ranks.worlds import Loss, OneProcess, OnRanks


@contextmanager
def server(size: int, timeout_s: float = 20.0) -> Iterator[ServerAddress | None]:
    """A real server for `size` ranks, in a thread; a rank alone has its own within."""
    if size == 1:
        yield None
        return
    listening = ParameterServer("127.0.0.1", size, b"a secret" * 4, timeout_s)
    thread = threading.Thread(target=listening.serve)
    thread.start()
    try:
        yield listening.address
    finally:
        # It waits for workers that failed before they came; in a run their driver ends it.
        for rank in range(size):
            if thread.is_alive():
                with suppress(PeerLostError):
                    connect_to_server(listening.address, rank).close()
        thread.join()


def serve_ranks(size: int, body: Callable[[Group, Any], Any]) -> list[Any]:
    """Run ``body(group, address)`` once per rank; results, or exceptions, by rank."""
    with server(size) as address:
        return outcomes(size, lambda group: body(group, address))


class OnServer(OnRanks):
    """One rank's part of every batch, through `ParameterServerSync`."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        address: ServerAddress | None,
        shares: Sequence[float],
        *,
        way: str,
        cap_mb: float,
    ) -> None:
        OneProcess.__init__(self, modules)
        self.group, self.shares, self.way = group, shares, way
        self._address, self._cap_mb = address, cap_mb
        self._sync: ParameterServerSync | None = None
        programs.made.optimizers = []

    @property
    def sync(self) -> ParameterServerSync:
        """Attached before the first backward, when the program has made its optimizers."""
        if self._sync is None:
            self._sync = ParameterServerSync(
                list(self.modules),
                programs.made.optimizers,
                self.group,
                self._address,
                bucket_cap_mb=self._cap_mb,
            )
        return self._sync

    def accumulate(self, loss: Loss, batches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        super().accumulate(loss, batches)

    def end(self) -> None:
        self.sync.detach()
        del programs.made.optimizers
