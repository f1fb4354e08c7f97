# SPDX-License-Identifier: Apache-2.0
"""Writes a file whole, or leaves the previous one: temporary file, fsync, rename, fsync.

The first part of a large file is flushed to the disk while the rest is still written: otherwise
the disk would idle first, and then the writer would wait for the disk.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final

from lockstep.checkpoint.temporary_paths import held_path, remove_leftovers
from lockstep.errors import CheckpointWriteError

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTES_PER_SYNC: Final = 1 << 26
"""Bytes after which a write starts an fsync in the background; each call of fsync has a cost."""

_CAUSES: Final = {
    errno.ENOSPC: ("the disk is full", "free some space, or save elsewhere"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or save elsewhere"),
    errno.EFBIG: ("the file is larger than allowed", "raise the limit (`ulimit -f`)"),
    errno.EACCES: ("the folder may not be written to", "save elsewhere, or change its owner"),
    errno.EPERM: ("the folder may not be written to", "save elsewhere, or change its owner"),
    errno.EROFS: ("the file system is read-only", "save elsewhere"),
    errno.EEXIST: ("part of the path is a file, not a folder", "save elsewhere"),
    errno.ENOTDIR: ("part of the path is a file, not a folder", "save elsewhere"),
    errno.EISDIR: ("the path is a directory", "give the path of a file in it"),
    errno.ENODEV: ("the path is a device, a pipe or a socket", "give the path of a file"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
}


def publish(path: str | os.PathLike[str], fill: Callable[[IO[bytes]], object]) -> None:
    """Give `path` the content that `fill` writes, in one atomic step.

    When the function returns, content and name are on the disk. When `fill` or the file system
    raises an error, `path` holds its previous content and the temporary file is removed. A process
    that is killed halfway leaves ``.lockstep-*.tmp`` beside `path`, which no reader takes for a
    checkpoint, and which the next writer to that folder removes.

    Args:
        path: the file; missing folders are created, a symbolic link is written through.
        fill: writes the content to the open temporary file that it is given, in the same folder.

    Raises:
        CheckpointWriteError: the file system refused a write. If it refused only to flush the
            folder, the new content is there, and the error says so.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError):
            remove_leftovers(folder)
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError(errno.ENODEV, "not a regular file", target)
        # Rejected: `tempfile`, whose files only their owner may read.
        with held_path(folder, _make_file) as temporary:
            try:
                _write_synced(temporary, target, fill)
                os.replace(temporary, target)
            except BaseException:  # Ctrl-C too must not leave half a file behind
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
        sync_new_name(folder, path)
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise write_error(path, error) from error


def _make_file(path: str) -> None:
    with open(path, "xb"):
        pass


def _write_synced(temporary: str, target: str, fill: Callable[[IO[bytes]], object]) -> None:
    with (
        ThreadPoolExecutor(max_workers=1) as syncer,
        _BackgroundSyncedFile(temporary, syncer) as raw,
        io.BufferedRandom(raw) as file,
    ):
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
        fill(file)
        file.flush()
        raw.sync()


class _BackgroundSyncedFile(io.FileIO):
    """An empty file whose content another thread flushes to the disk while more is written."""

    def __init__(self, path: str, syncer: ThreadPoolExecutor) -> None:
        self._syncer = syncer
        self._syncing: list[Future[None]] = []
        self._since = 0
        super().__init__(path, "r+b")

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._since += written
        if self._since >= _BYTES_PER_SYNC:
            self._since = 0
            self._syncing.append(self._syncer.submit(os.fsync, self.fileno()))
        return written

    def sync(self) -> None:
        """Return when the whole content is on the disk.

        Raises:
            OSError: a write failed. The system reports a failed write to one call of fsync only, so
                the results of the background calls are read as well.
        """
        for syncing in self._syncing:
            syncing.result()
        os.fsync(self.fileno())

    def close(self) -> None:
        # After the close another file may get this descriptor: no fsync may still be pending.
        for syncing in self._syncing:
            syncing.cancel()
        for syncing in self._syncing:
            if not syncing.cancelled():
                syncing.exception()
        super().close()


def fsync_path(path: str) -> None:
    """Flush a file, or the names in a folder, to the disk: then a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_new_name(folder: str, path: str | os.PathLike[str]) -> None:
    """Flush the name that the checkpoint `path` has just got in `folder` to the disk.

    Raises:
        CheckpointWriteError: the file system refused; the new checkpoint is there all the same.
    """
    try:
        fsync_path(folder)
    except OSError as error:
        # Some network file systems cannot sync a folder: their server makes renames durable.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            left = "the new one is there, and a power cut may undo it"
            raise write_error(path, error, left) from error


def write_error(
    path: str | os.PathLike[str],
    error: OSError,
    left: str = "what the file held before is untouched",
) -> CheckpointWriteError:
    """The error of a checkpoint that could not be written; `left` says what is there now."""
    cause, fix = _CAUSES.get(error.errno or 0, ("the file system refused", "save elsewhere"))
    failure = CheckpointWriteError(
        f"the checkpoint {os.fspath(path)} could not be written",
        where=os.path.abspath(path),
        got=str(error),
        cause=f"{cause}; {left}",
        fix=fix,
    )
    failure.errno = error.errno
    return failure
