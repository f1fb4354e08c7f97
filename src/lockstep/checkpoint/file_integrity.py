# SPDX-License-Identifier: Apache-2.0
"""Checksums that together cover every byte of a checkpoint file, so that any change is found.

torch's zip file holds a CRC-32 of every record's content, which torch computes from memory while
it writes the record. This CRC-32 covers each large record: it finds every change within 32
neighbouring bits, and misses one in four billion of all other changes. One SHA-256 covers all other
bytes: headers, padding, small records, and the directory, which holds the CRCs. Rejected: one
SHA-256 of the whole file, which takes as long as writing it, and finds no more of the damage that
files suffer.
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
    """The bytes of a zip file in which the contents of large records lie, in ascending order.

    Raises:
        zipfile.BadZipFile: the directory is damaged; `zipfile` also raises errors of other types.
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
    """The name of the first record whose content does not have the CRC that torch wrote."""
    with zipfile.ZipFile(file) as archive:
        return archive.testzip()


def _chunks(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    left = end - start
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        yield chunk
        left -= len(chunk)
