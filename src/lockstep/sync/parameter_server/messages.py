# SPDX-License-Identifier: Apache-2.0
"""Messages with tensors over a socket: how workers and a parameter server talk.

A message is a few words and some tensors. Its tensors travel as one block of bytes, each at a
place where any dtype may begin, so that nothing is pickled that is large.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from lockstep.errors import PeerLostError
from lockstep.serialization import join, pack, split, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTHS: Final = struct.Struct("<QQ")
_NOBODY_IS_SLOWER_S: Final = 60.0


@dataclass
class Message:
    """What one side says to the other.

    Attributes:
        what: the request or the answer, in one word.
        about: anything small that can be pickled.
        tensors: of any dtype and device; they arrive on the CPU.
    """

    what: str
    about: Any = None
    tensors: Sequence[torch.Tensor] = field(default_factory=list)


class Channel(Protocol):
    """A worker's way to the owner of the parameters."""

    def ask(self, message: Message) -> Message:
        """Send a request and wait for its answer.

        Collective:
            "add" and "step" are answered when every worker has asked the same.

        Raises:
            PeerLostError: the owner, or a worker that it waited for, went away.
            What the owner refused the request with.
        """

    def close(self) -> None:
        """Leave; idempotent."""


class ConnectionLostError(Exception):
    """The other side went away, or did not speak in time. Never leaves this package."""


@dataclass(frozen=True)
class Parcel:
    """A message as it travels; made once, whoever it is sent to."""

    head: bytes
    block: torch.Tensor


def packed(message: Message) -> Parcel:
    """`message`, ready to be sent."""
    tensors = [tensor.detach().contiguous() for tensor in message.tensors]
    structure, buffers = split((message.what, message.about, tensors))
    sizes = [buffer.numel() for buffer in buffers]
    return Parcel(pickle.dumps((structure, sizes)), pack(buffers))


class MessageSocket:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message | Parcel) -> None:
        """Raises `ConnectionLostError`."""
        parcel = packed(message) if isinstance(message, Message) else message
        head, block = parcel.head, parcel.block
        try:
            self._socket.sendall(_LENGTHS.pack(len(head), block.numel()) + head)
            if block.numel():
                self._socket.sendall(_memory_of(block))
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self) -> Message:
        """The next message. Raises `ConnectionLostError`."""
        head_length, block_length = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        structure, sizes = pickle.loads(self._exactly(head_length))
        block = torch.empty(block_length, dtype=torch.uint8, device="cpu")
        if block_length:
            self._fill(_memory_of(block))
        return Message(*join(structure, unpack(block, sizes)))

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, place: memoryview) -> None:
        try:
            while place.nbytes:
                count = self._socket.recv_into(place)
                if count == 0:
                    raise ConnectionLostError("the connection was closed")
                place = place[count:]
        except OSError as error:
            raise ConnectionLostError(str(error) or type(error).__name__) from error

    def cut(self) -> None:
        """End it for both sides; wakes a thread of this process that waits in it."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone would not wake a thread of this process that waits in `receive`.
        self.cut()
        self._socket.close()


def _memory_of(block: torch.Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


@dataclass(frozen=True)
class ServerAddress:
    """Where the owner of the parameters listens, and the secret that a worker shows it.

    Attributes:
        timeout_s: how long a worker waits for an answer, which includes waiting for its peers.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    timeout_s: float


def connect_to_server(address: ServerAddress, rank: int) -> ServerClient:
    """Connect rank `rank` to the owner.

    Raises:
        PeerLostError: nobody answers there.
    """
    place = f"rank {rank}"
    with ExitStack() as until_welcome:
        try:
            connection = until_welcome.enter_context(
                socket.create_connection(
                    (address.host, address.port),
                    timeout=min(address.timeout_s, _NOBODY_IS_SLOWER_S),
                )
            )
            line = MessageSocket(connection, address.timeout_s)
            connection.sendall(address.secret)
            line.send(Message("here", rank))
        except (OSError, ConnectionLostError) as error:
            raise _lost(place, error) from error
        until_welcome.pop_all()
    return ServerClient(line, place)


def shows(secret: bytes, connection: socket.socket) -> bool:
    """Does the other side send `secret`? Nothing that it sends is unpickled before."""
    given = bytearray()
    while len(given) < len(secret):
        piece = connection.recv(len(secret) - len(given))
        if not piece:
            return False
        given += piece
    return hmac.compare_digest(bytes(given), secret)


class ServerClient:
    """An owner in another process; see `Channel`."""

    def __init__(self, line: MessageSocket, place: str) -> None:
        self._line: MessageSocket | None = line
        self._place = place

    def ask(self, message: Message) -> Message:
        """See `Channel`.

        Collective:
            "add" and "step" are answered when every worker has asked the same.
        """
        if self._line is None:
            raise _lost(self._place, "this worker has left it")
        try:
            self._line.send(message)
            answer = self._line.receive()
        except ConnectionLostError as error:
            raise _lost(self._place, error) from error
        return checked(answer)

    def close(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        with suppress(ConnectionLostError):  # nobody is there to be told
            line.send(Message("leave"))
        line.close()


def checked(answer: Message) -> Message:
    """The answer; raised, if it is an error."""
    if answer.what == "error":
        error: BaseException = pickle.loads(answer.about)
        raise error
    return answer


def _lost(place: str, got: object) -> PeerLostError:
    return PeerLostError(
        "the parameter server does not answer",
        where=place,
        got=str(got) or type(got).__name__,
        cause="its process died, or ended because another rank died, raised or left",
        fix="look for the first failure among the other ranks",
    )
