# SPDX-License-Identifier: Apache-2.0
"""What survives: one file, written whole or not at all, verified, never executing code.

Three steps, each usable alone: `plain_state` turns a state into what can be read back
without running code (and refuses the rest by name), `serialise` writes that to a file object
and marks it, `publish` puts a file in its place atomically. `write` is the three in a row;
a background writer is the first one now and the other two later.

The file is a torch file like any other: ``torch.load(path, weights_only=True)`` reads it
too. Format name, version and checksum stand in the zip archive's comment, which torch skips.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from lockstep.checkpoint.directory import INDEX as _INDEX
from lockstep.checkpoint.directory import fill_directory as _fill_directory
from lockstep.checkpoint.directory import publish_directory as _publish_directory
from lockstep.checkpoint.directory import read_directory as _read_directory
from lockstep.checkpoint.format import load as _load
from lockstep.checkpoint.format import prove_readable as _prove_readable
from lockstep.checkpoint.format import serialise as serialise
from lockstep.checkpoint.plain import plain_state as plain_state
from lockstep.checkpoint.publish import publish as publish
from lockstep.checkpoint.publish import write_error
from lockstep.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["plain_state", "publish", "read", "serialise", "write", "write_directory"]


def write(path: str | os.PathLike[str], state: Mapping[str, Any]) -> str:
    """Save `state`: afterwards `path` holds all of it; after a failure, what it held before.

    Args:
        path: the file; missing folders are created, a symbolic link is written through.
        state: nested dicts, lists and tuples of tensors and plain Python values; see
            `plain_state` for what is converted and what is refused.

    Returns:
        `path` as a string.

    Raises:
        WrongTypeError: `state` is no dict.
        CheckpointError: something in it could not be read back; the message says where.
        CheckpointWriteError: the file could not be written (also an OSError).
    """
    plain = plain_state(state)

    def fill(file: IO[bytes]) -> None:
        serialise(plain, file)
        _prove_readable(file)

    publish(path, fill)
    return os.fspath(path)


def write_directory(path: str | os.PathLike[str], state: Mapping[str, Any]) -> str:
    """As `write`, into a directory whose tensors any torch program can read, in shards too.

    Returns:
        `path` as a string.

    Raises:
        CheckpointError: see `write`; or something else than such a directory is in the way.
        CheckpointWriteError: it could not be written (also an OSError).
    """
    plain = plain_state(state)
    try:
        _publish_directory(os.fspath(path), lambda folder: _fill_directory(folder, plain, write))
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise write_error(path, error) from error
    return os.fspath(path)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a state that `write` saved, every byte of it checked first, tensors on the CPU.

    Raises:
        CheckpointNotFoundError: there is no such file (also a FileNotFoundError).
        CheckpointError: the file is empty, truncated, damaged, foreign, written by a newer
            version, or a directory of somebody else's, or holds what only code could rebuild.
    """
    try:
        if os.path.isdir(path) and os.path.isfile(os.path.join(path, _INDEX)):
            return _read_directory(os.fspath(path), read(os.path.join(path, _INDEX)))
        # One open file for the check and the load: a writer that replaces `path` in between
        # cannot make us load what was not checked.
        with open(path, "rb") as file:
            return _load(file, os.fspath(path))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            "there is no checkpoint", where=os.path.abspath(path), fix="check the path"
        ) from error
    except OSError as error:
        raise CheckpointError(
            "the checkpoint cannot be opened or read",
            where=os.fspath(path),
            expected="a file that this process may read",
            got="a directory" if isinstance(error, IsADirectoryError) else str(error),
            fix="give the path of the file that `save` returned",
        ) from error
