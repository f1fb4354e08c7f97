# SPDX-License-Identifier: Apache-2.0
"""The interface that leads to a machine."""

import socket

from lockstep.worker.network_interface import interface_towards


def test_loopback_leads_to_this_machine():
    assert interface_towards("127.0.0.1", 29500) == "lo"


def test_the_way_out_is_an_interface_that_has_the_address_of_that_way():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("192.0.2.1", 9))
        except OSError:  # no network at all: there is no way out, and no interface
            assert interface_towards("192.0.2.1", 9) is None
            return
        own = way.getsockname()[0]
    name = interface_towards("192.0.2.1", 9)
    assert name in {each for _, each in socket.if_nameindex()} - {"lo"}
    # From this machine to its own address it is that interface's again.
    assert interface_towards(own, 9) == name


def test_an_address_of_another_family():
    assert interface_towards("::1", 29500) is None
