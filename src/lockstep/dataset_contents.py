# SPDX-License-Identifier: Apache-2.0
"""Which samples a dataset holds, by which ranks can tell whether they have the same ones."""

from __future__ import annotations

import datetime
import zlib
from contextlib import suppress
from numbers import Integral, Number
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

from lockstep.content_digest import content_digest
from lockstep.held_columns import (
    DEPTH,
    LEAST,
    PARTS,
    Column,
    columns_within,
    held_by,
    plain_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_SAMPLES: Final = 16
"""Of a list, at most, evenly spread."""
_NUMBERS: Final = 1024
"""Of whole numbers: those that have one value twice are labels."""
_SETTINGS: Final = (str, int, float, PurePath)
_FINGERPRINT: Final = "_fingerprint"
"""The attribute in which a Hugging Face dataset keeps a hash of its content."""
_COLUMNS: Final = (list, tuple, np.ndarray, np.memmap, torch.Tensor)


def contents_of(dataset: Any, size: int | None) -> list[int]:
    """A number for each list that names each of `size` samples, by names or whole numbers.

    Of tensors and other numbers nothing is said: a rank may have drawn them, as synthetic data.
    Lists in which samples have the same name tell nothing, as those of labels. Nothing of the
    program's is called: it may read files, or draw random numbers.
    """
    found = []
    for column in held_by(dataset).values():
        if type(column) not in (list, tuple) or len(column) != size or size < LEAST:
            continue
        places = _spread(size)
        names = [name for place in places if (name := _name_of(column[place]))]
        if len(names) == len(set(names)) == len(places):
            found.append(zlib.crc32(repr(names).encode()))
    return found


def held_contents(dataset: Any) -> list[str]:
    """Digests that are equal on ranks whose datasets have the same samples at the same positions.

    Of each column (see `lockstep.held_columns`) whose values name the samples: strings, whole
    numbers such as ids and indices, and lists, dicts and dataclasses in which there is a string.
    For torch's own: the positions that a ``Subset`` has chosen, and the datasets within both that
    and a ``ConcatDataset``. None where nothing can be told.
    """
    try:
        return [*filter(None, map(_names_in, columns_within(dataset)))]
    except Exception:  # of the program's `__len__`, or a library's column: nothing can be told
        return []


def _names_in(column: Column) -> str | None:
    """A digest of the values of `column`, if they name its samples."""
    names: list[str] = []
    size = column.size
    if column.is_choice:
        return content_digest(column.read(_spread(size)))
    with suppress(Exception):  # of a library's column that cannot be read so
        values = [_plain(value) for value in column.read(_spread(size))]
        if all(isinstance(value, Integral) for value in values):
            values = [_plain(value) for value in column.read(_spread(size, _NUMBERS))]
            if not column.is_index and not _number_places(values, size):
                return None
        elif not all(map(_has_text, values)):
            return None  # of numbers, which a rank may have drawn
        names = [_name_of(value) for value in values]
    is_named = all(names) and len(names) == len(set(names)) > 1
    return f"{column.name} {content_digest(names)}" if is_named else None


def _number_places(values: list[int], size: int) -> bool:
    """Are these the ids of `size` samples? Labels may all be different, too, if there are few.

    Ids are in order, or as close together as their number allows.
    """
    is_permutation = max(values) - min(values) < size
    return is_permutation or values == sorted(values) or values == sorted(values, reverse=True)


def _has_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(map(_has_text, value)))


def _plain(value: Any) -> Any:
    """What names a sample: Python's numbers and strings for numpy's, torch's or pandas'."""
    if isinstance(value, np.generic) or (type(value) is torch.Tensor and not value.ndim):
        value = value.item()
    return str(value) if isinstance(value, datetime.date) else plain_of(value)


def identity_of(dataset: Any) -> int | None:
    """A number that two ranks have in common only where their datasets hold the same samples.

    None of a dataset that holds no list, array or tensor in which each sample is another one, as
    one that computes them when it is asked. Everything that tells two datasets apart counts here,
    also what `contents_of` leaves out: numbers, whole paths, settings such as a folder or a seed.
    So datasets with two identities may well have the same samples.
    """
    described: list[str] = []
    try:
        is_known = _describe(dataset, described, DEPTH)
    except (TypeError, NotImplementedError):  # of one that has no length
        return None
    return zlib.crc32("\n".join(described).encode()) if is_known else None


def _describe(dataset: Any, described: list[str], depth: int) -> bool:
    """Add what `dataset` and those within it hold; True if that tells one sample from another."""
    is_known = False
    size = len(dataset)
    described.append(f"{size} samples")
    for name, value in held_by(dataset).items():
        described.append(f"{name}={value}" if isinstance(value, _SETTINGS) else name)
        is_known |= name == _FINGERPRINT
        for part in _parts(value, size):
            if isinstance(part, _SETTINGS):
                described.append(str(part))
            elif _is_column(part, size):
                samples = [part[place] for place in _spread(size)]
                digests = [content_digest(sample) for sample in samples]
                described += digests
                # A number that each sample has may be its place, which is the same in any dataset.
                is_known |= len({*digests}) == len(digests) and not any(map(_is_number, samples))
            elif depth and (isinstance(part, Dataset) or _FINGERPRINT in held_by(part)):
                is_told = _describe(part, described, depth - 1)
                # Of another size it may be what samples are drawn from, on each rank other ones.
                is_known |= is_told and (type(dataset) is ConcatDataset or len(part) == size)
    return is_known


def _parts(value: Any, size: int) -> list[Any]:
    """What `value` holds, where it is no column: all datasets, and the first of other things."""
    if _is_column(value, size):
        return [value]
    held = [*value.values()] if type(value) is dict else value
    if type(held) not in (list, tuple):
        return [held]
    return [part for place, part in enumerate(held) if place < PARTS or isinstance(part, Dataset)]


def _is_column(value: Any, size: int) -> bool:
    """Does `value` have a place for each sample?"""
    is_one = type(value) in _COLUMNS and (getattr(value, "ndim", 1) > 0)
    return size >= LEAST and is_one and len(value) == size


def _is_number(sample: Any) -> bool:
    return isinstance(sample, Number) or getattr(sample, "ndim", 1) == 0


def _spread(size: int, most: int = _SAMPLES) -> range:
    """At most `most` of `size` positions, evenly spread."""
    return range(0, size, max(1, -(-size // most)))


def _name_of(sample: Any, depth: int = DEPTH) -> str:
    """The names and whole numbers in a sample, as text; nothing where there are none."""
    if isinstance(sample, PurePath):
        return sample.name  # each host may have its copy elsewhere
    if type(sample) is str:
        is_path = sample.startswith("/") or (
            "/" in sample and not any(mark in sample for mark in " <\n")
        )
        return PurePath(sample).name if is_path else sample[:256]
    if type(sample) is bool or not depth:
        return ""
    if isinstance(sample, Integral):
        return str(int(sample))
    parts: Iterable[Any] = ()
    if isinstance(sample, tuple) or type(sample) is list:
        parts = sample
    elif type(sample) is dict:
        parts = sample.values()
    return ",".join(filter(None, (_name_of(part, depth - 1) for part in list(parts)[:PARTS])))
