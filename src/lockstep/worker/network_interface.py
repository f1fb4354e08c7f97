# SPDX-License-Identifier: Apache-2.0
"""Which network interface of a machine leads to another machine."""

from __future__ import annotations

import socket
import struct
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""Linux' SIOCGIFADDR."""


def interface_towards(host: str, port: int) -> str | None:
    """The network interface of this machine that leads to `host`; None if that cannot be told.

    The driver's address is one that every worker has reached, so their own addresses on the way
    there are such that they reach each other.
    """
    import fcntl  # not there on Windows, which has no such call either

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((host, port))  # sends nothing: it only chooses the way
        except OSError:
            return None
        own = socket.inet_aton(way.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(way, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if found[20:24] == own:
                return name
    return None
