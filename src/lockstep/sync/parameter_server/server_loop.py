# SPDX-License-Identifier: Apache-2.0
"""A parameter server: a `ParameterStore` behind a socket, one thread, one request at a time.

A worker has one request open at most and reads its answer at once, so that neither side can
wait for the other to read. If a worker vanishes, the server ends; if a worker leaves while another
one waits, the server closes every connection. Both free the workers that wait, without a timeout,
and only after the server has sent the answers that are due. The store outlives the server, for
another server with which the workers that are left go on.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from lockstep.sync.parameter_server.message_socket import ConnectionLostError, MessageSocket
from lockstep.sync.parameter_server.parameter_store import ParameterStore
from lockstep.sync.parameter_server.server_connection import ServerAddress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sync.parameter_server.messages import Message

_WELCOME_LIMIT_S: Final = 10.0
"""A worker sends secret and rank as soon as it is connected: a stranger must not hold up others."""


class _Session:
    """One store and the connections of its workers, by rank.

    A worker may connect twice (a trial run beside the run itself): the n-th connection of each
    rank belongs to the n-th session.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self.connections: dict[int, MessageSocket] = {}

    def answer_request(self, rank: int) -> list[MessageSocket]:
        """Answer one request of `rank`; returns the connections that it ended.

        Raises:
            ConnectionLostError: a worker is lost.
        """
        message = self.connections[rank].receive()
        if message.kind != "leave":
            self._send(self._store.handle(rank, message))
            return []
        self._store.leave(rank)
        left = [rank] if self._store.is_idle else list(self.connections)
        return [self.connections.pop(each) for each in left]

    def _send(self, answers: Mapping[int, Message]) -> None:
        lost: ConnectionLostError | None = None
        for rank, answer in answers.items():
            try:
                self.connections[rank].send(answer)
            except ConnectionLostError as error:
                # Send the other answers all the same: the step of those ranks has happened.
                lost = error
        if lost is not None:
            raise lost


class ParameterServer:
    """Listens for `size` workers.

    Args:
        host: the one address to listen on.
        size: how many workers there are.
        secret: a worker has to send it before anything of it is unpickled.
        timeout_s: how long a message that has begun may take to come, or to go.
        predecessor: the server of the generation before; it has ended.

    Attributes:
        store: of the run.
    """

    def __init__(
        self,
        host: str,
        size: int,
        secret: bytes,
        timeout_s: float,
        *,
        predecessor: ParameterServer | None = None,
    ) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self.store: ParameterStore = (
            ParameterStore(size) if predecessor is None else predecessor.store.make_successor(size)
        )
        self._listener = socket.create_server((host, 0), backlog=size)
        self.address = ServerAddress(host, self._listener.getsockname()[1], secret, timeout_s)
        self._selector = selectors.DefaultSelector()
        self._sessions: list[_Session] = []
        self._came: Counter[int] = Counter()
        self._is_called_off = False
        # A byte in this socket pair wakes a server that waits for workers.
        self._wake_receiver, self._wake_sender = socket.socketpair()

    def serve(self) -> None:
        """Answer until every worker has left, or one is lost, or `stop`.

        Collective:
            None: a process of its own, which every worker talks to.
        """
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        try:
            while self._is_needed():
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.fileobj in key.data[0].connections.values():
                        self._answer_request(*key.data)
        except ConnectionLostError:
            return  # a worker is lost: those that wait for it learn it from their own connections
        finally:
            self.close()

    def _is_needed(self) -> bool:
        if self._is_called_off:
            return False
        return len(self._came) < self._size or any(each.connections for each in self._sessions)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        try:
            connection = MessageSocket(accepted, min(self._timeout_s, _WELCOME_LIMIT_S))
            if not connection.receive_secret(self.address.secret):
                accepted.close()
                return
            rank: int = connection.receive().body
            connection.set_timeout(self._timeout_s)
        except (OSError, ConnectionLostError):
            accepted.close()  # not a worker
            return
        number = self._came[rank]
        self._came[rank] += 1
        if number == len(self._sessions):
            self._sessions.append(
                _Session(self.store if number == 0 else ParameterStore(self._size))
            )
        self._sessions[number].connections[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, (self._sessions[number], rank))

    def _answer_request(self, session: _Session, rank: int) -> None:
        for connection in session.answer_request(rank):
            self._selector.unregister(connection)
            connection.close()

    def stop(self) -> None:
        """End `serve`, also while it waits for workers; from another thread. Idempotent."""
        self._is_called_off = True
        with suppress(OSError):  # it has ended already
            self._wake_sender.send(b"!")
        for session in list(self._sessions):
            for connection in list(session.connections.values()):
                connection.cut()

    def close(self) -> None:
        """Close all connections; workers that wait get an error. Idempotent."""
        self._listener.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        for session in self._sessions:
            for connection in session.connections.values():
                connection.close()
            session.connections.clear()
