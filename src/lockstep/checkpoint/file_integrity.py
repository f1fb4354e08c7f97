# SPDX-License-Identifier: Apache-2.0
"""Which checksum covers which bytes of a checkpoint file, so that a change of any is found.

torch's zip file holds a CRC-32 of every record's content, computed from memory while the record
is written. Large records are covered by that: it finds every change within 32 neighbouring bits,
and of all others it misses one in four billion. Everything else (headers, padding, small
records, and the directory, which holds those CRCs) is covered by one SHA-256. Hashing all of it
would find no more of what happens to files, and take as long as writing them.
"""

from __future__ import annotations

import hashlib
import zipfile
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LARGE: Final = 1 << 16
_CHUNK: Final = 1 << 20
_LOCAL_HEADER_SIZE: Final = 30
_NO_COMMENT: Final = b"\0\0"


def large_record_ranges(file: IO[bytes]) -> list[range]:
    """Where the contents of large records lie in a zip file: bytes from its start, ascending.

    Raises:
        zipfile.BadZipFile: and whatever else `zipfile` raises for a directory that is no directory.
    """
    with zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if entry.file_size >= _LARGE]
    records = []
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER_SIZE)
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = entry.header_offset + _LOCAL_HEADER_SIZE + name + extra
        records.append(range(start, start + entry.file_size))
    return records


def sha256_excluding(file: IO[bytes], records: Sequence[range], content_size: int) -> str:
    """The SHA-256 of the first `content_size` bytes without `records`, and of an empty comment."""
    digest = hashlib.sha256()
    position = 0
    for record in (*records, range(content_size, content_size)):
        for chunk in _chunks(file, position, record.start):
            digest.update(chunk)
        position = record.stop
    digest.update(_NO_COMMENT)
    return digest.hexdigest()


def find_damaged_record(file: IO[bytes]) -> str | None:
    """The name of the first record whose content is not what was written."""
    with zipfile.ZipFile(file) as archive:
        return archive.testzip()


def _chunks(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    left = end - start
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        yield chunk
        left -= len(chunk)
