# SPDX-License-Identifier: Apache-2.0
"""On which addresses a process of this machine listens, as Linux tells it."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from pathlib import Path

LISTENS = "0A"


def _addresses(table: Path) -> dict[str, tuple[str, int]]:
    """Address and port of every listening socket, by inode."""
    found = {}
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENS:
            address, port = fields[1].split(":")
            words = struct.iter_unpack("<I", bytes.fromhex(address))
            packed = b"".join(struct.pack(">I", word) for (word,) in words)
            found[fields[9]] = (str(ipaddress.ip_address(packed)), int(port, 16))
    return found


def listens(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports."""
    network = Path(f"/proc/{pid}/net")
    known = {
        inode: place
        for table in ("tcp", "tcp6")
        if (network / table).exists()
        for inode, place in _addresses(network / table).items()
    }
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            socket = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
        if socket and socket[1] in known:
            found.add(known[socket[1]])
    return found
