# SPDX-License-Identifier: Apache-2.0
"""`MessageSocket`: one end of a connection between a worker and a parameter server.

Rejected: ``multiprocessing.connection`` and torch's rpc: neither has a timeout for one message that
another thread can end early.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import struct
from contextlib import suppress
from typing import Any, Final

import torch

from lockstep.serialization import join, unpack
from lockstep.sync.parameter_server.messages import Message

_LENGTHS: Final = struct.Struct("<QQ")


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

    def receive_secret(self, secret: bytes) -> bool:
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
