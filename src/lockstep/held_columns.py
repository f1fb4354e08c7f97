# SPDX-License-Identifier: Apache-2.0
"""The columns that a dataset holds: what has a place for each sample, and can be read from outside.

A column is a list, an array, a tensor, a column of a pandas frame or of an arrow table, as Hugging
Face's datasets have them. Reading one calls nothing of the program's: the ``__getitem__`` of a
dataset may read files, or draw random numbers.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.tensor_tree import PLAIN_TYPES, children_of, is_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Read = Callable[[Sequence[int]], list[Any]]

LEAST: Final = 8
"""Samples of a dataset of which something can be told."""
_PARTS: Final = 8
"""Of what an attribute of a dataset holds, at most; and columns of a frame or a table."""
_DEPTH: Final = 3
_LARGEST: Final = 1 << 40
"""Of the whole numbers of an object; larger ones may be addresses, or hashes of a process."""
_FOREIGN: Final = {"torch", "numpy", "PIL"}
_INDEX: Final = "index"


@dataclass(frozen=True)
class Column:
    """A value for each sample of a dataset.

    Attributes:
        name: its place in the dataset.
        read: ``read(places)``: the values at these positions.
        is_list: a list or tuple of Python's.
    """

    name: str
    read: Read
    is_list: bool = False


def columns_of(dataset: Any, size: int) -> Iterator[Column]:
    """The columns that `dataset` holds in itself and in its attributes."""
    if size < LEAST:
        return
    for name, value in held_by(dataset).items():
        yield from _columns_in(name, value, size)


def datasets_in(dataset: Any, size: int) -> Iterator[Any]:
    """The datasets of the same size among the attributes of `dataset`, of which it is a view."""
    for value in held_by(dataset).values():
        if isinstance(value, Dataset) or "_indices" in held_by(value):
            with suppress(Exception):  # a `__len__` of the program's, which nobody else asks for
                if len(value) == size:
                    yield value


def held_by(dataset: Any) -> dict[str, Any]:
    """What `dataset` holds, by the names of its attributes; itself, if it is a column."""
    if type(dataset) in (list, tuple, range, np.ndarray, np.memmap, torch.Tensor):
        return {"": dataset}
    return dict(getattr(dataset, "__dict__", {}))


def _columns_in(name: str, value: Any, size: int) -> Iterator[Column]:
    found = list(_columns_of_value(name, value, size))
    yield from found
    if found or type(value) not in (list, tuple, dict):
        return
    parts = value if isinstance(value, dict) else dict(enumerate(value[:_PARTS]))
    for key, part in list(parts.items())[:_PARTS]:
        yield from _columns_of_value(f"{name}[{key!r}]", part, size)


def _columns_of_value(name: str, value: Any, size: int) -> Iterator[Column]:
    root = type(value).__module__.partition(".")[0]
    if type(value) in (list, tuple, range):
        if len(value) == size:
            yield Column(name, lambda places: [value[place] for place in places], is_list=True)
    elif type(value) in (np.ndarray, np.memmap) or _is_plain_tensor(value):
        if value.ndim and len(value) == size:
            yield Column(name, lambda places: [value[place] for place in places])
    elif root == "pandas" and hasattr(value, "iloc"):
        if len(value) == size:
            yield from _columns_of_frame(name, value)
    elif root in ("pyarrow", "datasets") and getattr(value, "num_rows", None) == size:
        for number in range(min(_PARTS, getattr(value, "num_columns", 0))):
            yield Column(f"{name}[{number}]", _read_arrow(value, number))


def _is_plain_tensor(value: Any) -> bool:
    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_tensor and value.layout == torch.strided and value.device.type != "meta"


def _columns_of_frame(name: str, frame: Any) -> Iterator[Column]:
    yield Column(f"{name}.{_INDEX}", lambda places: frame.index[list(places)].tolist())
    if frame.ndim == 1:
        yield Column(name, lambda places: frame.iloc[list(places)].tolist())
        return
    for number in range(min(_PARTS, frame.shape[1])):
        yield Column(f"{name}[{number}]", _read_frame(frame, number))


def _read_frame(frame: Any, number: int) -> Read:
    return lambda places: frame.iloc[list(places), number].tolist()


def _read_arrow(table: Any, number: int) -> Read:
    return lambda places: table.column(number).take(list(places)).to_pylist()


def without_objects(value: Any, depth: int = _DEPTH, *, with_floats: bool = False) -> Any:
    """`value` with dicts in place of the program's own objects, which hold what can be compared.

    Those are tensors, arrays, strings (of a path the last part) and whole numbers; large ones may
    be addresses, and stay out. An object of any other class is its class's name.

    Args:
        with_floats: also the floating point of the program's objects, which may be a time.
    """
    if isinstance(value, (*PLAIN_TYPES, torch.Tensor, np.ndarray)) or is_rows(value):
        return value
    if isinstance(value, PurePath):
        return value.name  # each host may have its copy elsewhere
    children = children_of(value)
    if children is not None:
        return {
            str(key): without_objects(child, depth, with_floats=with_floats)
            for key, child in children
        }
    held: dict[str, Any] = {"": type(value).__name__}
    root = type(value).__module__.partition(".")[0]
    if depth and root not in _FOREIGN and root not in sys.stdlib_module_names:
        for name, part in held_by(value).items():
            kept = _comparable(part, depth - 1, with_floats)
            if kept is not None:
                held[name] = kept
    return held


def _comparable(part: Any, depth: int, with_floats: bool) -> Any:
    if isinstance(part, str | PurePath):
        return PurePath(part).name if "/" in str(part) else str(part)
    if isinstance(part, Integral):
        return int(part) if abs(int(part)) < _LARGEST else None
    if isinstance(part, PLAIN_TYPES) or callable(part):
        return part if with_floats and isinstance(part, float) else None
    if is_rows(part):
        kept = [_comparable(each, depth, with_floats) for each in part]
        return None if None in kept else kept
    return without_objects(part, depth, with_floats=with_floats) if depth >= 0 else None
