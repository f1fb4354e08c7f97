# SPDX-License-Identifier: Apache-2.0
"""`ServerConnection`: a worker's connection to a parameter server in another process."""

from __future__ import annotations

import pickle
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lockstep.errors import PeerLostError
from lockstep.phases import Phase, in_phase
from lockstep.sync.parameter_server.message_socket import ConnectionLostError, MessageSocket
from lockstep.sync.parameter_server.messages import Message

if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT_LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class ServerAddress:
    """The address of a parameter server, and the secret that a worker has to send.

    Attributes:
        timeout_s: how long a worker waits for an answer, which includes waiting for its peers.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    timeout_s: float


def connect_to_server(
    address: ServerAddress, rank: int, on_lost: Callable[[], None] | None = None
) -> ServerConnection:
    """Connect rank `rank` to its parameter server.

    Args:
        on_lost: called when a request fails because the server, or a worker, went away.

    Raises:
        PeerLostError: no server answers there.
    """
    place = f"rank {rank}"
    with ExitStack() as until_welcome:
        try:
            connection = until_welcome.enter_context(
                socket.create_connection(
                    (address.host, address.port), timeout=min(address.timeout_s, _CONNECT_LIMIT_S)
                )
            )
            messages = MessageSocket(connection, address.timeout_s)
            connection.sendall(address.secret)
            messages.send(Message("here", rank))
        except (OSError, ConnectionLostError) as error:
            raise _server_lost_error(place, error) from error
        until_welcome.pop_all()
    return ServerConnection(messages, place, on_lost)


class ServerConnection:
    """A worker's connection to a server in another process; see `Channel`."""

    def __init__(
        self, messages: MessageSocket, place: str, on_lost: Callable[[], None] | None
    ) -> None:
        self._messages: MessageSocket | None = messages
        self._place = place
        self._on_lost = on_lost

    @in_phase(Phase.WAITING)
    def ask(self, message: Message) -> Message:
        """See `Channel`.

        Collective:
            A request in which all ranks take part is answered when all have sent it.
        """
        try:
            return self._ask(message)
        except PeerLostError:
            if self._on_lost is not None:
                self._on_lost()
            raise

    def _ask(self, message: Message) -> Message:
        if self._messages is None:
            raise _server_lost_error(self._place, "this worker has left it")
        try:
            self._messages.send(message)
            answer = self._messages.receive()
        except ConnectionLostError as error:
            raise _server_lost_error(self._place, error) from error
        return raise_if_error(answer)

    def close(self) -> None:
        messages, self._messages = self._messages, None
        if messages is None:
            return
        with suppress(ConnectionLostError):  # the server has ended
            messages.send(Message("leave"))
        messages.close()


def raise_if_error(answer: Message) -> Message:
    """`answer`; raises the exception that it holds instead, if it is one."""
    if answer.kind == "error":
        error: BaseException = pickle.loads(answer.body)
        raise error
    return answer


def _server_lost_error(place: str, got: object) -> PeerLostError:
    return PeerLostError(
        "the parameter server does not answer",
        where=place,
        got=str(got) or type(got).__name__,
        cause="its process died, or ended because another rank died, raised or left",
        fix="look for the first failure among the other ranks",
    )
