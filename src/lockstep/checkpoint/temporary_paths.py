# SPDX-License-Identifier: Apache-2.0
"""Temporary files and folders beside checkpoints, each held by its writer while that lives.

A writer locks what it writes (`held_path`), and the system frees the lock when the writer's process
ends, however that happens. So `remove_leftovers` tells what a killed writer has left from what
another trainer is writing; each writer calls it first. Where a file system has no locks, no path is
held: only who has the folder for itself removes anything there.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME: Final = re.compile(r"\.lockstep-[0-9a-f]{16}\.(tmp|old)")


def new_temporary_path(folder: str, suffix: str = ".tmp") -> str:
    """A path in `folder` that no other process uses; nothing is there yet."""
    return os.path.join(folder, f".lockstep-{secrets.token_hex(8)}{suffix}")


@contextmanager
def held_path(folder: str, make: Callable[[str], object], suffix: str = ".tmp") -> Iterator[str]:
    """A new temporary path in `folder`, which no process removes as a leftover inside.

    Args:
        make: makes the file or folder at the path. The caller renames or removes it in the end.
        suffix: ".old" for a folder that holds what another one is to replace (`moved_away`).
    """
    path, held = _make_held(folder, make, suffix)
    try:
        yield path
    finally:
        os.close(held)


def _make_held(folder: str, make: Callable[[str], object], suffix: str) -> tuple[str, int]:
    while True:
        path = new_temporary_path(folder, suffix)
        make(path)
        # Before the lock is there, another process may take the path for a leftover.
        with suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY)
            if try_lock(held, fcntl.LOCK_SH) and os.path.exists(path):
                return path, held
            os.close(held)


def remove(path: str) -> None:
    """Remove a file, a link or a folder; a folder is renamed first: none is there by half."""
    with suppress(FileNotFoundError):
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        with held_path(os.path.dirname(path), partial(os.rename, path)) as doomed:
            shutil.rmtree(doomed)


@contextmanager
def moved_away(path: str) -> Iterator[None]:
    """Inside, another file or folder can take the name `path`; then the one that had it is removed.

    It comes back where no other one has taken the name, also after a kill (`remove_leftovers`).
    """
    folder, name = os.path.split(path)
    with held_path(folder, os.mkdir, ".old") as aside:
        try:
            os.rename(path, os.path.join(aside, name))
            yield
        finally:
            _put_back_or_remove(aside)


def _put_back_or_remove(aside: str) -> None:
    for name in os.listdir(aside):
        path = os.path.join(os.path.dirname(aside), name)
        if not os.path.lexists(path):
            os.rename(os.path.join(aside, name), path)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: str, *, is_own: bool = False) -> None:
    """Remove what killed writers have left in `folder`, which would fill the disk.

    Args:
        is_own: no other program writes there. All is removed then, also without locks.
    """
    for name in os.listdir(folder):
        if _NAME.fullmatch(name):
            _remove_unless_held(os.path.join(folder, name), is_own=is_own)


def _remove_unless_held(path: str, *, is_own: bool) -> None:
    is_folder = os.path.isdir(path)
    try:
        if os.path.islink(path):
            os.unlink(path)  # no writer makes a link, so no writer holds one
            return
        # Network file systems lock a file for one process alone only if that may write to it.
        found = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    except (FileNotFoundError, PermissionError):
        return  # another process has removed it, or it is another user's
    try:
        if try_lock(found, fcntl.LOCK_EX, without_locks=is_own):
            if path.endswith(".old"):
                _put_back_or_remove(path)
            elif is_folder:
                shutil.rmtree(path)
            else:
                os.unlink(path)
    finally:
        os.close(found)


def try_lock(descriptor: int, how: int, *, without_locks: bool = True) -> bool:
    """Lock an open file or folder; False if another process has locked it.

    Args:
        without_locks: what to return for a file system that has no locks.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True
