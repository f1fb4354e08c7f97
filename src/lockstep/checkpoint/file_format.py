# SPDX-License-Identifier: Apache-2.0
"""The bytes of a checkpoint: torch's own zip file, with lockstep's mark as the archive's comment.

::

    torch's zip file without its last two bytes | length of the mark (2 bytes) | the mark

    mark: lockstep-checkpoint {"sha256":"<64 hex>","version":2} <crc32 of all before it, 8 hex>

The comment is the last field of a zip file, and its length the last but one: torch writes no
comment, and readers skip it. Checksums cover every byte: the large records' own CRCs their content,
the SHA-256 all other bytes of torch's file (as torch wrote it, with a comment of length zero; see
`file_integrity`), the mark's real length the length field, and the mark's CRC the mark. So a reader
can trust the mark before it has checked the content, and reports a newer file as newer, not as
damaged. Files of version 1, whose SHA-256 covers all of torch's bytes, can be read as well.

Rejected: a record of lockstep's inside the archive (it cannot hold a checksum of the archive, and
adding one needs torch's private writer); a second file (two files cannot be replaced in one step);
the zip's CRC-32 per record alone (it does not cover the directory).
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch

from lockstep.checkpoint.atomic_write import publish
from lockstep.checkpoint.file_integrity import (
    find_damaged_record,
    large_record_ranges,
    sha256_excluding,
)
from lockstep.checkpoint.plain_values import plain_state
from lockstep.error_texts import first_line
from lockstep.errors import CheckpointError
from lockstep.host_memory import is_lack_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION: Final = 2
_NAME: Final = b"lockstep-checkpoint "
_LOCAL_HEADER: Final = b"PK\x03\x04"
_END_OF_DIRECTORY: Final = b"PK\x05\x06"
_END_SIZE: Final = 22
_NO_COMMENT: Final = b"\0\0"
_MAX_COMMENT: Final = 0xFFFF
_RESAVE: Final = "load an older checkpoint, or copy this one again from where it was written"


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
        CheckpointError: a value in it could not be read back; the message names its place.
        CheckpointWriteError: the file could not be written (also an OSError).
    """
    plain = plain_state(state)

    def fill(file: IO[bytes]) -> None:
        serialise(plain, file)
        _check_readable(file)

    publish(path, fill)
    return os.fspath(path)


def read_file(path: str) -> dict[str, Any]:
    """The state in a file that `write` saved.

    Raises:
        CheckpointError, OSError: see `lockstep.checkpoint.read`.
    """
    # One open file serves the check and the load: a writer that replaces `path` in between must
    # not make `torch.load` read bytes that were not checked.
    with open(path, "rb") as file:
        return _load(file, path)


def serialise(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write `state`, as `plain_state` gives it, to an empty seekable `file`, and mark it.

    Raises:
        OSError: the file could not be written.
    """
    writer = _FailureKeepingWriter(file)
    with _record_crcs_enabled():
        torch.save(state, cast("IO[bytes]", writer))
    if writer.failure is not None:
        raise writer.failure
    if not (writer.tail.startswith(_END_OF_DIRECTORY) and writer.tail.endswith(_NO_COMMENT)):
        raise CheckpointError(
            "this torch writes files that lockstep cannot mark",
            expected="a zip file without a comment",
            got=f"torch {torch.__version__}, a file that ends in {writer.tail!r}",
            fix="use a torch version that lockstep was tested with",
        )
    content_size = file.seek(-len(_NO_COMMENT), os.SEEK_END)
    mark = _make_mark(sha256_excluding(file, large_record_ranges(file), content_size))
    file.seek(content_size)
    file.write(struct.pack("<H", len(mark)) + mark)


def _check_readable(file: IO[bytes]) -> None:
    """Raise an error unless torch can load what `serialise` wrote (mapped: no tensor is read).

    `plain_state` refuses all types that are known to be unreadable; this check finds the others.
    """
    file.flush()
    try:
        torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        raise CheckpointError(
            "the state could not be read back after writing", cause=first_line(error)
        ) from error


def _load(file: IO[bytes], path: str) -> dict[str, Any]:
    """The state in an open file, after every byte of it has been checked.

    Raises:
        CheckpointError: see `lockstep.checkpoint.read`.
        MemoryError, RuntimeError: the file is good, and the host has too little memory for it.
    """
    mark, content_size = _read_mark(file, path)
    if mark["version"] > VERSION:
        raise CheckpointError(
            f"written by format {mark['version']}, this lockstep reads up to {VERSION}: upgrade",
            where=path,
            fix="pip install --upgrade lockstep-train",
        )
    damage = _find_damage(file, mark, content_size)
    if damage is not None:
        raise _damaged_error(path, damage)
    file.seek(0)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CheckpointError(
            "the checkpoint holds an object that only code could rebuild; it was not run",
            where=path,
            got=first_line(error),
            cause="it was not written by lockstep, or altered on purpose",
            fix="do not use this file",
        ) from error
    except OSError:
        raise
    except Exception as error:  # of any type, for a layout that this torch does not know
        # A reader of a folder goes on with an older file only where this one is bad.
        if is_lack_of_memory(error):
            raise
        raise CheckpointError(
            "torch cannot read the checkpoint, whose checksum is right",
            where=path,
            got=first_line(error),
            cause="it was written by a newer torch than this one",
            fix="use the torch version that it was written with",
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            "not a checkpoint", where=path, expected="a dict", got=type(state).__qualname__
        )
    return state


@contextmanager
def _record_crcs_enabled() -> Iterator[None]:
    """Make torch write the CRCs of records, which a program can switch off for its process."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _FailureKeepingWriter:
    """Passes torch's bytes on to the file, and keeps the first OSError for `serialise` to raise.

    An OSError must not travel through torch's C++ writer, which would raise a RuntimeError about
    positions instead, or end the process in a destructor. After the first OSError all further
    bytes are dropped.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.tail = b""
        self.failure: OSError | None = None
        self._file = file

    def write(self, data: memoryview | bytes) -> int:
        if self.failure is None:
            self.tail = (self.tail + bytes(data[-_END_SIZE:]))[-_END_SIZE:]
            try:
                self._file.write(data)
            except OSError as error:
                self.failure = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch calls this at the end, and the file's owner flushes the file."""


def _make_mark(sha256: str) -> bytes:
    fields = json.dumps({"sha256": sha256, "version": VERSION}, separators=(",", ":"))
    body = _NAME + fields.encode("ascii") + b" "
    return body + b"%08x" % zlib.crc32(body)


def _read_mark(file: IO[bytes], path: str) -> tuple[dict[str, Any], int]:
    """The mark's fields, and the size of torch's part without its comment length."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise CheckpointError(
            "the checkpoint is empty", where=path, got="a file of 0 bytes", fix=_RESAVE
        )
    start_of_tail = file.seek(max(0, size - _MAX_COMMENT - _END_SIZE))
    tail = file.read()
    at = tail.rfind(_NAME)
    if at < 0:
        raise _foreign_file_error(file, path)
    mark = tail[at:]
    body, crc = mark[:-8], mark[-8:]
    if crc != b"%08x" % zlib.crc32(body):
        raise _damaged_error(path, "its last bytes, which identify it, are damaged")
    if tail[:at][-2:] != struct.pack("<H", len(mark)):
        raise _damaged_error(path, "the length of its last field is wrong")
    fields: dict[str, Any] = json.loads(body.removeprefix(_NAME))  # its CRC is right
    return fields, start_of_tail + at - len(_NO_COMMENT)


def _find_damage(file: IO[bytes], mark: Mapping[str, Any], content_size: int) -> str | None:
    """What is damaged in torch's part of the file; None if all its checksums are right."""
    other = "its checksum does not match its content"
    if mark["version"] == 1:
        return None if sha256_excluding(file, [], content_size) == mark["sha256"] else other
    try:
        records = large_record_ranges(file)
    except OSError:
        raise
    except Exception as error:  # `zipfile` raises errors of many types for a damaged file
        if is_lack_of_memory(error):
            raise
        return f"its directory cannot be read ({first_line(error)})"
    if sha256_excluding(file, records, content_size) != mark["sha256"]:
        return other
    changed = find_damaged_record(file)
    return None if changed is None else f"the checksum of {changed} does not match its content"


def _damaged_error(path: str, got: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged",
        where=path,
        got=got,
        cause="it was cut off or changed after it was written",
        fix=_RESAVE,
    )


def _foreign_file_error(file: IO[bytes], path: str) -> CheckpointError:
    file.seek(0)
    start = file.read(len(_LOCAL_HEADER))
    expected = "a file that lockstep's `save` wrote"
    if start != _LOCAL_HEADER:
        return CheckpointError(
            "not a checkpoint",
            where=path,
            expected=expected,
            got=f"a file that begins with {start!r}",
        )
    if zipfile.is_zipfile(file):
        return CheckpointError(
            "a torch or zip file without lockstep's mark",
            where=path,
            expected=expected,
            cause="it was written by `torch.save`, or its last bytes are damaged",
            fix="read weights with `torch.load(path, weights_only=True)`, not with `load`; a state"
            " that RaySGD saved: `trainer.load_state_dict(torch.load(path, weights_only=True))`",
        )
    return _damaged_error(path, "its end is missing")
