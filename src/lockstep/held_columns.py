# SPDX-License-Identifier: Apache-2.0
"""The columns that a dataset holds: what has a place for each sample, and can be read from outside.

A column is a list, an array, a tensor, a column of a pandas frame or of an arrow table, as Hugging
Face's datasets have them. Reading one calls nothing of the program's: the ``__getitem__`` of a
dataset may read files, or draw random numbers.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Read = Callable[[Sequence[int]], list[Any]]

LEAST: Final = 8
"""Samples of a dataset of which something can be told."""
PARTS: Final = 8
"""Of a sample, of an attribute of a dataset, and columns of a frame or a table, at most."""
DEPTH: Final = 3
"""Of what lies within a sample, and of datasets within a dataset."""
_LARGEST: Final = 1 << 40
"""Of the whole numbers of an object; larger ones may be addresses, or hashes of a process."""
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None))
_FOREIGN: Final = {"torch", "numpy", "PIL"}
_INDICES: Final = "_indices"
"""The attribute in which a Hugging Face dataset keeps the rows that it has chosen of its table."""


@dataclass(frozen=True)
class Column:
    """A value for each sample of a dataset.

    Attributes:
        name: its place in the dataset.
        read: ``read(places)``: the values at these positions.
        is_list: a list or tuple of Python's.
        is_index: a library has made its whole numbers, to tell rows from one another.
        is_choice: the positions that a ``Subset`` has chosen, of which some may come twice.
        size: samples of the dataset.
    """

    name: str
    read: Read
    is_list: bool = False
    is_index: bool = False
    is_choice: bool = False
    size: int = 0


def columns_within(dataset: Any, depth: int = DEPTH) -> Iterator[Column]:
    """The columns of `dataset`, and of the datasets that it is made of or is a view of.

    Raises:
        Exception: what a ``__len__`` of the program's raises.
    """
    if type(dataset) is ConcatDataset:
        for each in dataset.datasets:
            yield from columns_within(each, depth)
        return
    size = len(dataset)
    if type(dataset) is Subset:
        chosen = dataset.indices
        yield Column("", lambda places: [chosen[p] for p in places], is_choice=True, size=size)
        yield from columns_within(dataset.dataset, depth)
        return
    for column in _columns_of(dataset, size):
        yield replace(column, size=size)
    for each in _datasets_in(dataset, size) if depth else ():
        yield from columns_within(each, depth - 1)


def _columns_of(dataset: Any, size: int) -> Iterator[Column]:
    if size >= LEAST:
        for name, value in held_by(dataset).items():
            yield from _columns_in(name, value, size)


def _datasets_in(dataset: Any, size: int) -> Iterator[Any]:
    """The datasets of the same size among the attributes of `dataset`, of which it is a view."""
    for value in held_by(dataset).values():
        if isinstance(value, Dataset) or _INDICES in held_by(value):
            with suppress(Exception):  # a `__len__` of the program's, which nobody else asks for
                if len(value) == size:
                    yield value


def held_by(dataset: Any) -> dict[str, Any]:
    """What `dataset` holds, by the names of its attributes; itself, if it is a column."""
    if type(dataset) in (list, tuple, range, np.ndarray, np.memmap, torch.Tensor):
        return {"": dataset}
    try:
        return dict(object.__getattribute__(dataset, "__dict__"))  # not by its `__getattr__`
    except AttributeError:
        return {}


def _columns_in(name: str, value: Any, size: int) -> Iterator[Column]:
    found = list(_columns_of_value(name, value, size))
    yield from found
    if found or type(value) not in (list, tuple, dict):
        return
    parts = value if isinstance(value, dict) else dict(enumerate(value[:PARTS]))
    for key, part in list(parts.items())[:PARTS]:
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
        for number in range(min(PARTS, getattr(value, "num_columns", 0))):
            read = _read_arrow(value, number)
            yield Column(f"{name}[{number}]", read, is_index=name == _INDICES)


def _is_plain_tensor(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return False
    return bool(value.layout == torch.strided) and value.device.type != "meta"


def _columns_of_frame(name: str, frame: Any) -> Iterator[Column]:
    index = frame.index
    yield Column(f"{name}.index", lambda places: index[list(places)].tolist(), is_index=True)
    if frame.ndim == 1:
        yield Column(name, lambda places: frame.iloc[list(places)].tolist())
        return
    for number in range(min(PARTS, frame.shape[1])):
        yield Column(f"{name}[{number}]", _read_frame(frame, number))


def _read_frame(frame: Any, number: int) -> Read:
    return lambda places: frame.iloc[list(places), number].tolist()


def _read_arrow(table: Any, number: int) -> Read:
    def read(places: Sequence[int]) -> list[Any]:
        column = table.column(number)
        # One by one: `take` joins the chunks of strings first, a copy of the whole column.
        return [_of_scalar(column[place]) for place in places]

    return read


def _of_scalar(scalar: Any, depth: int = DEPTH) -> Any:
    """The value of an arrow scalar: of a list the first elements, of bytes (a picture) nothing."""
    kind = type(scalar).__name__
    if not scalar.is_valid or any(part in kind for part in ("Binary", "Extension", "Map")):
        return None
    if "List" in kind:
        return [_of_scalar(each, depth - 1) for each in scalar.values[:PARTS]] if depth else None
    if kind == "StructScalar":
        fields = range(min(PARTS, len(scalar)))
        return [_of_scalar(scalar[each], depth - 1) for each in fields] if depth else None
    return scalar.as_py()


def plain_of(value: Any, depth: int = DEPTH, *, with_objects: bool = False) -> Any:
    """The first of what `value` holds, as lists of tensors, arrays and plain values.

    Looked into are dicts, lists, tuples and dataclasses, whose classes run none of the program's
    code, so deep and at so many parts as bounds the work for any sample. All else is None.

    Args:
        with_objects: also the tensors, arrays and numbers that are attributes of an object of the
            program's. They may be a time or an address, and its strings a random name: such an
            object names no sample.
    """
    if _is_leaf(value):
        return value
    if isinstance(value, PurePath):
        return value.name  # each host may have its copy elsewhere
    parts = _parts_of(value)
    if parts is not None:
        if not depth:
            return None
        return [plain_of(part, depth - 1, with_objects=with_objects) for part in parts]
    return _numbers_held_by(value) if with_objects else None


def _is_leaf(value: Any) -> bool:
    if type(value) in (np.ndarray, np.memmap):
        return not value.dtype.hasobject
    return type(value) in _PLAIN or isinstance(value, np.generic) or _is_plain_tensor(value)


def _parts_of(value: Any) -> list[Any] | None:
    if type(value) is list:
        return value[:PARTS]
    if isinstance(value, tuple):  # named ones too
        return [*islice(tuple.__iter__(value), PARTS)]
    if type(value) is dict:
        return [*islice(value.values(), PARTS)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held, fields = held_by(value), dataclasses.fields(value)
        return [held.get(field.name) for field in fields[:PARTS]]
    return None


def _numbers_held_by(value: Any) -> list[Any] | None:
    root = type(value).__module__.partition(".")[0]
    if isinstance(value, type) or root in _FOREIGN or root in sys.stdlib_module_names:
        return None
    parts = islice(held_by(value).values(), PARTS)
    return [part for part in parts if _is_leaf(part) and not _may_be_address(part)]


def _may_be_address(part: Any) -> bool:
    return isinstance(part, str | bytes) or (type(part) is int and abs(part) >= _LARGEST)


def tensors_of(value: Any) -> list[Any]:
    """The tensors and arrays that are attributes of an object of the program's."""
    held = _numbers_held_by(value) or []
    return [part for part in held if type(part) not in _PLAIN and not isinstance(part, np.generic)]
