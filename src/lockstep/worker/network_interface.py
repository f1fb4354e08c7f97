# SPDX-License-Identifier: Apache-2.0
"""Finds the network interface of this machine that leads to another machine."""

from __future__ import annotations

import socket
import struct
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""Linux' SIOCGIFADDR."""


def interface_towards(host: str, port: int) -> str | None:
    """The network interface of this machine that leads to `host`; None if that is unknown.

    `host` is the driver, which every worker can reach; so the workers can reach each other at the
    addresses that they have on the way to the driver.
    """
    import fcntl  # missing on Windows, which has no such call either

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((host, port))  # sends nothing: a UDP connect only chooses the route
        except OSError:
            return None
        own = socket.inet_aton(way.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(way, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # the interface has no address
            if found[20:24] == own:
                return name
    return None
