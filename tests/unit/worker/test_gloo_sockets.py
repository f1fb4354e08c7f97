# SPDX-License-Identifier: Apache-2.0
"""The sockets of this process, looked at and left as they were."""

import os
import socket

import pytest

from lockstep.errors import PeerLostError
from lockstep.group import Group
from lockstep.worker import gloo_sockets
from lockstep.worker.gloo_sockets import GlooSockets


@pytest.fixture
def default_timeout():
    socket.setdefaulttimeout(30.0)
    yield
    socket.setdefaulttimeout(None)


def _pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def test_sockets_of_other_libraries_block_as_before(default_timeout):
    """A program that sets a default timeout has clients in C, whose sockets block."""
    blocking, other = _pair()
    with blocking, other:
        os.set_blocking(blocking.fileno(), True)
        os.set_blocking(other.fileno(), False)
        with GlooSockets().record_new_sockets():
            pass
        assert os.get_blocking(blocking.fileno())
        assert not os.get_blocking(other.fileno())


def test_a_socket_that_gloo_makes_non_blocking_meanwhile_stays_so(monkeypatch):
    """Set back to blocking, it would block gloo's thread: the group waits until its timeout."""
    near, far = _pair()
    read_ports = gloo_sockets._ports

    def while_gloo_connects(one):
        if one.fileno() == near.fileno():
            os.set_blocking(near.fileno(), False)
        return read_ports(one)

    monkeypatch.setattr(gloo_sockets, "_ports", while_gloo_connects)
    with near, far:
        with GlooSockets().record_new_sockets():
            pass
        assert not os.get_blocking(near.fileno())


class OverSocket(Group):
    """Notes whether its connection still stood when it was given up."""

    connection = None
    stood = False

    def give_up(self):
        super().give_up()
        self.stood = self.connection.send(b"there") == 5


def test_a_group_refuses_before_its_connections_end():
    """A sum that ends early is no error everywhere, unless the group says so by then."""
    near, far = _pair()
    with near, far:
        connections, group = GlooSockets(), OverSocket(None)
        group.connection = near
        connections.find_peer_sockets(group)
        connections._peer_sockets.add((near.fileno(), os.fstat(near.fileno()).st_ino))
        connections.shut_down()
        assert group.stood
        with pytest.raises(OSError, match="Broken pipe"):
            near.send(b"gone")
        with pytest.raises(PeerLostError, match="given up"):
            group.exchange(0)
