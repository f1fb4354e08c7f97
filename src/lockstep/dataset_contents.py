# SPDX-License-Identifier: Apache-2.0
"""Which samples a dataset holds, by which ranks can tell whether they have the same ones."""

from __future__ import annotations

import zlib
from contextlib import suppress
from numbers import Integral
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lockstep.content_digest import content_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

_SAMPLES: Final = 16
"""Of a list, at most, evenly spread."""
_LEAST: Final = 8
_PARTS: Final = 8
"""Of a sample, at most."""
_DEPTH: Final = 3


def contents_of(dataset: Any, size: int | None) -> list[int]:
    """A number for each list that names each of `size` samples, by names or whole numbers.

    Of tensors and other numbers nothing is said: a rank may have drawn them, as synthetic data.
    Lists in which samples have the same name tell nothing, as those of labels. Nothing of the
    program's is called: it may read files, or draw random numbers.
    """
    held = [dataset] if type(dataset) is list else getattr(dataset, "__dict__", {}).values()
    found = []
    for column in list(held):
        if type(column) not in (list, tuple) or len(column) != size or size < _LEAST:
            continue
        places = _spread(size)
        names = [name for place in places if (name := _name_of(column[place]))]
        if len(names) == len(set(names)) == len(places):
            found.append(zlib.crc32(repr(names).encode()))
    return found


def held_contents(dataset: Any) -> list[str | int]:
    """Numbers that are equal on ranks whose datasets have the same samples at the same positions.

    Beside those of `contents_of`, for torch's own datasets: the whole numbers of a
    ``TensorDataset``, the positions that a ``Subset`` has chosen, and the datasets within both that
    and a ``ConcatDataset``. None where nothing can be told.
    """
    if type(dataset) is ConcatDataset:
        return [number for each in dataset.datasets for number in held_contents(each)]
    if type(dataset) is Subset:
        places = _spread(len(dataset.indices))
        chosen = [dataset.indices[place] for place in places]
        return [content_digest(chosen), *held_contents(dataset.dataset)]
    if type(dataset) is TensorDataset:
        # Not of floating point: what a host has computed may differ in the last bits.
        exact = [each for each in dataset.tensors if not each.is_floating_point()]
        return [content_digest([each[place] for each in exact for place in _spread(len(each))])]
    with suppress(TypeError, NotImplementedError):  # from its `__len__`
        return [*contents_of(dataset, len(dataset))]
    return []


def _spread(size: int) -> range:
    """At most `_SAMPLES` of `size` positions, evenly spread."""
    return range(0, size, max(1, -(-size // _SAMPLES)))


def _name_of(sample: Any, depth: int = _DEPTH) -> str:
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
    return ",".join(filter(None, (_name_of(part, depth - 1) for part in list(parts)[:_PARTS])))
