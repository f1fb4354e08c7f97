# SPDX-License-Identifier: Apache-2.0
"""The sockets of this process, looked at and left as they were."""

import os
import socket

import pytest

from lockstep.worker.connections import Connections


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
        with Connections().opening():
            pass
        assert os.get_blocking(blocking.fileno())
        assert not os.get_blocking(other.fileno())
