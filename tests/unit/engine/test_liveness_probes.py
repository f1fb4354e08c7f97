# SPDX-License-Identifier: Apache-2.0
"""Whether another machine can be reached, asked by a process that may lack what it asks with."""

import resource
import socket

from lockstep.engine.liveness_probes import is_host_reachable


def test_a_port_where_nobody_listens_is_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        assert is_host_reachable(address)
    assert is_host_reachable(address)


def test_a_process_without_file_descriptors_says_nothing_of_another_machine():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        reached = is_host_reachable(("127.0.0.1", 9))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert reached
