# SPDX-License-Identifier: Apache-2.0
"""A ledger as a file, which is replaced as a whole while its rank trains on. Imports no torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lockstep.audit.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path

_TRIES = 5


class LedgerFile:
    """Where one process writes its ledger, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()

    def write(self, ledger: Ledger) -> None:
        """All or nothing. The program may change the ledger meanwhile."""
        with self._writing:
            for left in reversed(range(_TRIES)):
                try:
                    data = ledger.to_bytes()
                except RuntimeError:  # something was added while it was read
                    if not left:
                        return
                    continue
                partial = self.path.with_suffix(".partial")
                partial.write_bytes(data)
                partial.replace(self.path)
                return


def read_ledger(path: Path) -> Ledger | None:
    """The ledger in the file at `path`; None if there is none that is whole."""
    try:
        return Ledger.from_bytes(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return None
