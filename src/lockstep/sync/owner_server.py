# SPDX-License-Identifier: Apache-2.0
"""An `Owner` behind a socket: one thread, one request at a time.

A worker has one request open at most and reads its answer at once, so that neither side can
wait for the other to read. When a worker vanishes, or leaves while another one waits, the
server ends, and its closed connections free everybody: nobody waits for a timeout.
"""

from __future__ import annotations

import selectors
import socket
from typing import TYPE_CHECKING, Final

from lockstep.sync.owner import Owner
from lockstep.sync.wire import Line, LineClosedError, OwnerAddress, shows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sync.wire import Message

# A worker says who it is as soon as it is connected; a stranger must not hold up the others.
_INTRODUCTION_S: Final = 10.0


class OwnerServer:
    """Listens for `size` workers.

    Args:
        host: the one address to listen on.
        secret: what a worker has to show before anything of it is read.
        timeout_s: how long a message that has begun may take to come, or to go.
    """

    def __init__(self, host: str, size: int, secret: bytes, timeout_s: float) -> None:
        self._owner = Owner(size)
        self._size = size
        self._timeout_s = timeout_s
        self._listener = socket.create_server((host, 0), backlog=size)
        self.address = OwnerAddress(host, self._listener.getsockname()[1], secret, timeout_s)
        self._lines: dict[int, Line] = {}

    def serve(self) -> None:
        """Answer until every worker has left, or one is lost.

        Collective:
            None: a process of its own, which every worker talks to.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                came: set[int] = set()
                while len(came) < self._size or self._lines:
                    for key, _ in selector.select():
                        if key.fileobj is self._listener:
                            self._accept(selector, came)
                        elif not self._attend(selector, key.data):
                            return
            finally:
                self.close()

    def _accept(self, selector: selectors.BaseSelector, came: set[int]) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(min(self._timeout_s, _INTRODUCTION_S))
        try:
            if not shows(self.address.secret, connection):
                connection.close()
                return
            line = Line(connection, self._timeout_s)
            rank: int = line.receive().about
        except (OSError, LineClosedError):
            connection.close()  # somebody who is no worker
            return
        came.add(rank)
        self._lines[rank] = line
        selector.register(line, selectors.EVENT_READ, rank)

    def _attend(self, selector: selectors.BaseSelector, rank: int) -> bool:
        """One request of `rank`; False if the workers cannot go on."""
        line = self._lines[rank]
        try:
            message = line.receive()
            if message.what == "leave":
                self._owner.leave(rank)
                selector.unregister(line)
                self._lines.pop(rank).close()
                return self._owner.is_idle
            self._send(self._owner.handle(rank, message))
        except LineClosedError:
            return False
        return True

    def _send(self, answers: Mapping[int, Message]) -> None:
        for rank, answer in answers.items():
            self._lines[rank].send(answer)

    def close(self) -> None:
        """End: workers that wait get an error. Idempotent."""
        self._listener.close()
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()
