# SPDX-License-Identifier: Apache-2.0
"""An `ParameterStore` behind a socket: one thread, one request at a time.

A worker has one request open at most and reads its answer at once, so that neither side can
wait for the other to read. When a worker vanishes the server ends, and when one leaves while
another one waits it closes their lines: either frees who waits, and nobody needs a timeout.
What is due to the others they get before that. The owner outlives it, for another server with
whom the workers that are left go on.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from lockstep.sync.parameter_server.messages import (
    ConnectionLostError,
    MessageSocket,
    ServerAddress,
    packed,
    shows,
)
from lockstep.sync.parameter_server.parameter_store import ParameterStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sync.parameter_server.messages import Message, Parcel

# A worker says who it is as soon as it is connected; a stranger must not hold up the others.
_INTRODUCTION_S: Final = 10.0


class _Session:
    """One owner and the lines of its workers.

    A worker may register twice (a trial run beside the run itself): the n-th connection of each
    rank belongs to the n-th session.
    """

    def __init__(self, owner: ParameterStore) -> None:
        self._owner = owner
        self.lines: dict[int, MessageSocket] = {}

    def attend(self, rank: int) -> list[MessageSocket]:
        """One request of `rank`; returns the lines that it ended.

        Raises:
            ConnectionLostError: a worker is lost.
        """
        message = self.lines[rank].receive()
        if message.what != "leave":
            self._send(self._owner.handle(rank, message))
            return []
        self._owner.leave(rank)
        left = [rank] if self._owner.is_idle else list(self.lines)
        return [self.lines.pop(each) for each in left]

    def _send(self, answers: Mapping[int, Message]) -> None:
        parcels: dict[int, Parcel] = {}
        lost: ConnectionLostError | None = None
        for rank, answer in answers.items():
            if id(answer) not in parcels:
                parcels[id(answer)] = packed(answer)
            try:
                self.lines[rank].send(parcels[id(answer)])
            except ConnectionLostError as error:
                # The others' step has happened all the same.
                lost = error
        if lost is not None:
            raise lost


class ParameterServer:
    """Listens for `size` workers.

    Args:
        host: the one address to listen on.
        size: how many workers there are.
        secret: what a worker has to show before anything of it is read.
        timeout_s: how long a message that has begun may take to come, or to go.
        before: the server of the generation before; it has ended.

    Attributes:
        owner: of the run.
    """

    def __init__(
        self,
        host: str,
        size: int,
        secret: bytes,
        timeout_s: float,
        *,
        before: ParameterServer | None = None,
    ) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self.owner: ParameterStore = (
            ParameterStore(size) if before is None else before.owner.succeeded_by(size)
        )
        self._listener = socket.create_server((host, 0), backlog=size)
        self.address = ServerAddress(host, self._listener.getsockname()[1], secret, timeout_s)
        self._selector = selectors.DefaultSelector()
        self._sessions: list[_Session] = []
        self._came: Counter[int] = Counter()
        self._is_called_off = False
        # What wakes a server that waits for workers who will not come.
        self._ear, self._bell = socket.socketpair()

    def serve(self) -> None:
        """Answer until every worker has left, or one is lost, or `call_off`.

        Collective:
            None: a process of its own, which every worker talks to.
        """
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)
        try:
            while self._is_needed():
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.fileobj in key.data[0].lines.values():
                        self._attend(*key.data)
        except ConnectionLostError:
            return  # a worker is lost: those that wait for it learn it from their own lines
        finally:
            self.close()

    def _is_needed(self) -> bool:
        if self._is_called_off:
            return False
        return len(self._came) < self._size or any(each.lines for each in self._sessions)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(min(self._timeout_s, _INTRODUCTION_S))
        try:
            if not shows(self.address.secret, connection):
                connection.close()
                return
            line = MessageSocket(connection, self._timeout_s)
            rank: int = line.receive().about
        except (OSError, ConnectionLostError):
            connection.close()  # somebody who is no worker
            return
        number = self._came[rank]
        self._came[rank] += 1
        if number == len(self._sessions):
            self._sessions.append(
                _Session(self.owner if number == 0 else ParameterStore(self._size))
            )
        self._sessions[number].lines[rank] = line
        self._selector.register(line, selectors.EVENT_READ, (self._sessions[number], rank))

    def _attend(self, session: _Session, rank: int) -> None:
        for line in session.attend(rank):
            self._selector.unregister(line)
            line.close()

    def call_off(self) -> None:
        """End `serve`, whoever it waits for; from another thread. Idempotent."""
        self._is_called_off = True
        with suppress(OSError):  # it has ended already
            self._bell.send(b"!")
        for session in list(self._sessions):
            for line in list(session.lines.values()):
                line.cut()

    def close(self) -> None:
        """End: workers that wait get an error. Idempotent."""
        self._listener.close()
        self._selector.close()
        self._ear.close()
        self._bell.close()
        for session in self._sessions:
            for line in session.lines.values():
                line.close()
            session.lines.clear()
