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
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGE: Final = 1 << 16
_CHUNK: Final = 1 << 20
_LOCAL_HEADER_SIZE: Final = 30
_NO_COMMENT: Final = b"\0\0"


@dataclass(frozen=True)
class Record:
    """A large record of the archive.

    Attributes:
        start: of its content, in bytes from the start of the file.
        size: of its content, in bytes.
        crc: of its content, as the directory says.
    """

    name: str
    start: int
    size: int
    crc: int


def large_records(file: IO[bytes]) -> list[Record]:
    """The large records of a zip file, by their place in it.

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
        records.append(Record(entry.filename, start, entry.file_size, entry.CRC))
    return records


def digest_around(file: IO[bytes], records: list[Record], content_size: int) -> str:
    """The SHA-256 of the first `content_size` bytes without those of `records`, and of an empty
    comment."""
    digest = hashlib.sha256()
    position = 0
    for record in records:
        for chunk in _chunks(file, position, record.start):
            digest.update(chunk)
        position = record.start + record.size
    for chunk in _chunks(file, position, content_size):
        digest.update(chunk)
    digest.update(_NO_COMMENT)
    return digest.hexdigest()


def changed_record(file: IO[bytes], records: list[Record]) -> Record | None:
    """The first record whose content is not what was written."""
    for record in records:
        crc = 0
        for chunk in _chunks(file, record.start, record.start + record.size):
            crc = zlib.crc32(chunk, crc)
        if crc != record.crc:
            return record
    return None


def _chunks(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    left = end - start
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        yield chunk
        left -= len(chunk)
