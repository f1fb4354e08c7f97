# SPDX-License-Identifier: Apache-2.0
"""Messages between the workers and a parameter server, and the sockets that they travel over.

A message is a kind, a body of any sort, and tensors. Tensors travel as one block of bytes, so that
nothing large is pickled. Rejected: ``multiprocessing.connection`` and torch's rpc: neither
has a timeout for one message that another thread can end early.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from lockstep.serialization import join, pack, split, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTHS: Final = struct.Struct("<QQ")

Groups = list[tuple[dict[str, Any], list[int]]]
"""An optimizer's parameter groups: their settings, and the numbers of their parameters."""


@dataclass
class Message:
    """A request of a worker, or the server's answer.

    Attributes:
        kind: of a request, see `ParameterStore`; of an answer, "done" or "error".
        body: anything that can be pickled.
        tensors: strided, of any dtype and device; they arrive on the CPU.
    """

    kind: str
    body: Any = None
    tensors: Sequence[torch.Tensor] = field(default_factory=list)

    @cached_property
    def packed(self) -> tuple[bytes, torch.Tensor]:
        """The message as bytes: a pickled head, a block of tensors. Made once for all receivers."""
        tensors = [tensor.detach().contiguous() for tensor in self.tensors]
        structure, buffers = split((self.kind, self.body, tensors))
        sizes = [buffer.numel() for buffer in buffers]
        return pickle.dumps((structure, sizes)), pack(buffers)


@dataclass
class OptimizerRequest:
    """The body of a request that concerns one optimizer.

    Attributes:
        number: of the optimizer, among those that the server holds.
        groups: its parameter groups as they are at the worker.
        weights: numbers of the parameters whose new values are the first of the message's tensors.
        with_gradient: numbers of those whose gradients follow.
        state: the state dict that the optimizer is to load.
        undo_point: steps of the run to which an interruption leads back; None: to none.
    """

    number: int
    groups: Groups
    weights: list[int] = field(default_factory=list)
    with_gradient: list[int] = field(default_factory=list)
    state: Any = None
    undo_point: int | None = None


class Channel(Protocol):
    """A worker's connection to its parameter server."""

    def ask(self, message: Message) -> Message:
        """Send a request and wait for its answer.

        Collective:
            A request in which all ranks take part is answered when all have sent it.

        Raises:
            PeerLostError: the server, or a worker that it waited for, went away.
            Whatever the server refused the request with.
        """

    def close(self) -> None:
        """Leave; idempotent."""


class ConnectionLostError(Exception):
    """The other side closed the connection, or sent nothing in time. Stays in this package."""


class MessageSocket:
    """One end of a connection that carries messages."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the longest time that a message may take to arrive, or to be sent, once begun."""
        self._socket.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises `ConnectionLostError`."""
        head, block = message.packed
        try:
            self._socket.sendall(_LENGTHS.pack(len(head), block.numel()) + head)
            if block.numel():
                self._socket.sendall(_memory_of(block))
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self) -> Message:
        """The next message. Raises `ConnectionLostError`."""
        head_length, block_length = _LENGTHS.unpack(self._read(_LENGTHS.size))
        structure, sizes = pickle.loads(self._read(head_length))
        block = torch.empty(block_length, dtype=torch.uint8, device="cpu")
        if block_length:
            self._fill(_memory_of(block))
        return Message(*join(structure, unpack(block, sizes)))

    def has_sent(self, secret: bytes) -> bool:
        """Whether the other side sends `secret`. Nothing that it sends is unpickled before.

        Raises `ConnectionLostError`.
        """
        return hmac.compare_digest(self._read(len(secret)), secret)

    def _read(self, length: int) -> bytes:
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
        """Shut the connection down for both sides; wakes a thread that waits in it."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone would not wake a thread of this process that waits in `receive`.
        self.cut()
        self._socket.close()


def _memory_of(block: torch.Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)
