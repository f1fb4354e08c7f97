# SPDX-License-Identifier: Apache-2.0
"""Locks a directory for the trainers of one process, so that no other program writes a run there.

Two programs in one directory would remove each other's checkpoints and mix their logs.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from typing import Final

from lockstep.checkpoint.temporary_paths import try_lock
from lockstep.errors import ConfigurationError


class DirectoryLock:
    """A lock that this process holds until the last reference to it goes, or until it ends.

    Args:
        descriptor: the open directory, which is locked.

    Attributes:
        run: which of the runs of this process has trained last; None if none has.
    """

    def __init__(self, descriptor: int) -> None:
        self.run: object | None = None
        self.close = weakref.finalize(self, os.close, descriptor)


# By device and inode: a path may lead through links.
_locks: Final[weakref.WeakValueDictionary[tuple[int, int], DirectoryLock]] = (
    weakref.WeakValueDictionary()
)


def lock_directory(folder: str) -> DirectoryLock:
    """Lock `folder` for this process.

    The trainers of one process share the lock: a notebook's cell makes a second trainer before it
    lets the first one go. Nothing is written: the system locks the directory itself. Where a file
    system has no locks, or none for directories (NFS), nobody is refused.

    Raises:
        ConfigurationError: another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    found = os.fstat(descriptor)
    lock = _locks.get((found.st_dev, found.st_ino))
    if lock is not None:
        os.close(descriptor)
        return lock
    if not try_lock(descriptor, fcntl.LOCK_EX):
        os.close(descriptor)
        raise ConfigurationError(
            "another program trains in checkpoint_dir",
            where=folder,
            cause="this program was started twice, or the one before has not ended yet",
            fix=f"wait for it, or end it (`fuser {folder}` names it); or give each run a"
            " checkpoint_dir of its own",
        )
    lock = _locks[found.st_dev, found.st_ino] = DirectoryLock(descriptor)
    return lock


def _close_all() -> None:
    for lock in list(_locks.values()):
        lock.close()


# A forked process (of a DataLoader) would hold the lock when this process has been killed.
os.register_at_fork(after_in_child=_close_all)
