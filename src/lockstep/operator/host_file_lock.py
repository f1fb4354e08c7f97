# SPDX-License-Identifier: Apache-2.0
"""A file lock between the processes of one machine; the file is there only while it is held."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# The name contains the user id: this process could not open the file of another user.
DATA_LOCK: Final = os.path.join(tempfile.gettempdir(), f"lockstep-data-{os.getuid()}.lock")


@contextmanager
def host_lock(path: str = DATA_LOCK) -> Iterator[None]:
    """Hold a lock that one process of this machine holds at a time; blocks until it is free.

    The file at `path` exists only while a process holds the lock. A process that gets the lock of
    a file that was removed meanwhile waits again: a third process may hold the lock of a new file.
    """
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            if _is_at(path, held):
                try:
                    yield
                    return
                finally:
                    with suppress(FileNotFoundError):  # a cleaner may have removed it
                        os.unlink(path)
                    # Closing would not unlock the file: processes forked inside hold it, too.
                    fcntl.flock(held, fcntl.LOCK_UN)
        finally:
            os.close(held)


def _is_at(path: str, held: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(held))
    except FileNotFoundError:
        return False
