# SPDX-License-Identifier: Apache-2.0
"""`GlooSockets`: finds gloo's sockets to other ranks, and shuts them down from another thread.

A host that loses its power, or its network, sends no packet and no reset: ranks elsewhere that
wait for its ranks in a collective of gloo's wait until the group's timeout. Measured on torch
2.13: `abort` and `shutdown` of the group return at once and free no rank; ``shutdown(SHUT_RDWR)``
on gloo's own socket, from another thread, ends the wait within milliseconds.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.group import Group

_OPEN_FILES: Final = "/dev/fd"

_T = TypeVar("_T")

_Socket = tuple[int, int]
"""A descriptor, and the inode of its socket: the system gives descriptors out again."""


class GlooSockets:
    """The sockets that gloo opened in this process; torch has no interface for them.

    A socket is gloo's if it was opened while a group formed and another rank opened its other end
    at that time: threads of Ray or of the user may open sockets of their own meanwhile.

    Args:
        generation: the generation of the group that uses the sockets; None before the first one.
    """

    def __init__(self, generation: int | None = None) -> None:
        self.generation = generation
        self._new_sockets: dict[_Socket, tuple[int, int]] = {}
        self._peer_sockets: set[_Socket] = set()
        self._groups: list[Group] = []

    @contextmanager
    def record_new_sockets(self) -> Iterator[None]:
        """Inside, a group forms: record the sockets that are opened meanwhile."""
        before = _connected_sockets()
        yield
        self._new_sockets = {key: v for key, v in _connected_sockets().items() if key not in before}

    def find_peer_sockets(self, group: Group) -> None:
        """Find out which of the recorded sockets lead to other ranks of `group`.

        Gradient:
            None: metadata only.

        Collective:
            Every rank: one exchange of port numbers.

        Raises:
            PeerLostError: another rank went away.
        """
        self._groups = [one for one in self._groups if not one.is_closed] + [group]
        opened, self._new_sockets = self._new_sockets, {}
        ports = group.exchange([local for local, _ in opened.values()])
        others = {port for rank, part in enumerate(ports) if rank != group.rank for port in part}
        self._peer_sockets |= {key for key, (_, remote) in opened.items() if remote in others}

    def forget(self) -> None:
        """Forget the sockets of groups that this rank leaves: gloo closes them."""
        self._peer_sockets = set()

    def shut_down(self) -> None:
        """End all waits for other ranks; from any thread. The groups cannot be used afterwards.

        The groups are the run's, and those of copies beside the run (`Worker.make_copy`).
        """
        for group in self._groups:
            group.give_up()
        for descriptor, inode in list(self._peer_sockets):
            with suppress(OSError):  # it was closed meanwhile
                if os.fstat(descriptor).st_ino == inode:
                    _with_socket(descriptor, lambda one: one.shutdown(socket.SHUT_RDWR))


def _connected_sockets() -> dict[_Socket, tuple[int, int]]:
    """The connected TCP sockets of this process with their local and remote ports."""
    found: dict[_Socket, tuple[int, int]] = {}
    if not os.path.isdir(_OPEN_FILES):
        return found
    for name in os.listdir(_OPEN_FILES):
        with suppress(OSError, ValueError):  # closed meanwhile, or no connection
            state = os.fstat(int(name))
            if stat.S_ISSOCK(state.st_mode):
                found[int(name), state.st_ino] = _with_socket(int(name), _ports)
    return found


def _ports(one: socket.socket) -> tuple[int, int]:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        raise ValueError("not a TCP connection")
    return one.getsockname()[1], one.getpeername()[1]


def _with_socket(descriptor: int, function: Callable[[socket.socket], _T]) -> _T:
    # With `socket.setdefaulttimeout`, Python makes its owner's socket non-blocking. Otherwise it
    # leaves it alone, and so must we: gloo makes a new socket non-blocking itself, at any moment,
    # and a socket that was then set back would block gloo's thread for ever.
    is_changed = socket.getdefaulttimeout() is not None and os.get_blocking(descriptor)
    one = socket.socket(fileno=descriptor)
    try:
        return function(one)
    finally:
        one.detach()  # gloo owns the socket, and closes it
        if is_changed:
            os.set_blocking(descriptor, True)
