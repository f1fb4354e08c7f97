# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch whose structure is the user's: how many, joined, or none.

A batch is a tensor or an array, a sequence of rows (strings, numbers), or tuples, lists,
dictionaries and dataclasses of batches. A list or tuple is a sequence of rows when it holds
nothing but plain values, else it is structure; that is what torch's ``default_collate``
makes. What is neither is refused by its place in the batch, never guessed at.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import NotShardableError

_PLAIN: Final = (str, bytes, int, float, complex, bool, np.generic, type(None))


def leading_length(batch: Any) -> int:
    """Number of rows: the leading length of the first tensor, array or sequence of rows.

    Raises:
        NotShardableError: nothing in the batch has a length.
    """
    found = _first_length(batch)
    if found is None:
        found = len(batch) if hasattr(batch, "__len__") else None
    if found is None:
        raise NotShardableError(
            "the number of samples in a batch cannot be read from it",
            expected="a tensor, array or sequence somewhere in the batch",
            got=type(batch).__name__,
            fix="yield batches of tensors (tuples, dicts and dataclasses of them are fine)",
        )
    return found


def _first_length(batch: Any) -> int | None:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    children = children_of(batch)
    if children is None:
        return len(batch) if _is_rows(batch) else None
    lengths = (_first_length(child) for _, child in children)
    return next((length for length in lengths if length is not None), None)


def concatenate(batches: Sequence[Any]) -> Any:
    """One batch with the rows of all `batches` (equal structures), in order.

    Raises:
        NotShardableError: a place in the batches cannot be joined; the message names it.
    """
    return batches[0] if len(batches) == 1 else _join(list(batches), "batch")


def _join(parts: list[Any], place: str) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _refusal("joined", place, ", ".join(type(part).__name__ for part in parts))
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _join_arrays(parts, place)
    children = children_of(first)
    if children is None:
        return _join_plain(parts, place)
    columns = []
    for key, _ in children:
        columns.append((key, _join([_child(part, key, place) for part in parts], place + key)))
    return rebuilt(first, columns)


def _join_arrays(parts: list[Any], place: str) -> Any:
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    if any(part.ndim == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise _refusal("joined along dim 0", place, f"shapes {shapes}")
    try:
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return torch.cat(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refusal("joined along dim 0", place, f"shapes {shapes}: {error}") from error


def _join_plain(parts: list[Any], place: str) -> Any:
    first = parts[0]
    if _is_rows(first):
        return type(first)(row for part in parts for row in part)
    # A value that belongs to no row (a name, a scale) is joined only when all parts agree.
    if isinstance(first, _PLAIN) and all(part == first for part in parts):
        return first
    raise _refusal("joined", place, f"a {type(first).__name__}")


def rows_of(batch: Any, rows: slice) -> Any:
    """A batch of the same structure with some of the rows; ``slice(0)`` takes none.

    Raises:
        NotShardableError: a place in the batch cannot be sliced; the message names it.
    """
    return _sliced(batch, rows, "batch")


def _sliced(batch: Any, rows: slice, place: str) -> Any:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        try:
            return batch[rows]
        except (RuntimeError, IndexError, NotImplementedError) as error:
            raise _unsliceable(place, f"{type(batch).__name__}: {error}") from error
    children = children_of(batch)
    if children is not None:
        return rebuilt(batch, [(key, _sliced(child, rows, place + key)) for key, child in children])
    if _is_rows(batch):
        return batch[rows]
    if isinstance(batch, _PLAIN):
        return batch
    raise _unsliceable(place, f"a {type(batch).__name__}")


def map_leaves(batch: Any, function: Callable[[Any, str], Any], place: str = "") -> Any:
    """The same structure around ``function(leaf, place)`` of all that is not structure."""
    children = children_of(batch)
    if children is None:
        return function(batch, place)
    columns = [(key, map_leaves(child, function, place + key)) for key, child in children]
    return rebuilt(batch, columns)


def map_children(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same container around what `change` makes of each child; a leaf is itself."""
    children = children_of(batch)
    if children is None:
        return batch
    return rebuilt(batch, [(key, change(child)) for key, child in children])


def content_digest(value: Any) -> str:
    """A short digest of what `value` holds, equal in every process; 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    _absorb(value, state.update)
    return state.hexdigest()


def _absorb(value: Any, update: Callable[[bytes], None]) -> None:
    shape = (getattr(value, "dtype", None), tuple(getattr(value, "shape", ())))
    update(f"{type(value).__name__} {shape}".encode())
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        value = value.detach().cpu().contiguous().view(-1)
        update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(value.tobytes())
    elif (children := children_of(value)) is not None:
        for key, child in children:
            update(key.encode())
            _absorb(child, update)
    elif isinstance(value, _PLAIN) or _is_rows(value):
        # Anything else counts by its type only: its repr may hold an address.
        update(repr(value).encode())


def _is_rows(batch: Any) -> bool:
    return isinstance(batch, (list, tuple)) and all(isinstance(row, _PLAIN) for row in batch)


def children_of(batch: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, keyed as one would write it; None for what is not structure."""
    if isinstance(batch, PackedSequence):
        return None  # a tuple of tensors whose rows are interleaved
    if isinstance(batch, Mapping):
        return [(f"[{key!r}]", child) for key, child in batch.items()]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(f".{f.name}", getattr(batch, f.name)) for f in dataclasses.fields(batch)]
    if isinstance(batch, (list, tuple)) and not _is_rows(batch):
        return [(f"[{number}]", child) for number, child in enumerate(batch)]
    return None


def _child(batch: Any, key: str, place: str) -> Any:
    for own, child in children_of(batch) or []:
        if own == key:
            return child
    raise _refusal("joined", place, f"a {type(batch).__name__} without {key}")


def rebuilt(like: Any, columns: list[tuple[str, Any]]) -> Any:
    """A container of the kind of `like` around other children, keyed as `children_of` does."""
    values = [value for _, value in columns]
    if isinstance(like, Mapping):
        named: Any = dict(zip(like, values, strict=True))
        if type(like) is dict:
            return named
        twin: Any = copy.copy(like)
        for key, value in named.items():
            twin[key] = value
        return twin
    if dataclasses.is_dataclass(like):
        twin = copy.copy(like)
        for field, value in zip(dataclasses.fields(like), values, strict=True):
            object.__setattr__(twin, field.name, value)  # frozen ones as well
        return twin
    if hasattr(like, "_fields"):
        return type(like)(*values)
    return type(like)(values)


def _refusal(verb: str, place: str, got: str) -> NotShardableError:
    return NotShardableError(
        f"{place} cannot be {verb}: a worker's shards have to become one batch",
        where=place,
        expected="tensors or arrays that differ in dim 0 only, or equal structures of them",
        got=got,
        fix="use a map-style dataset with batch_size=..., or one shard per worker "
        "(num_shards equal to num_workers)",
    )


def _unsliceable(place: str, got: str) -> NotShardableError:
    return NotShardableError(
        f"{place} has no version with zero rows, which a rank without samples needs",
        where=place,
        expected="tensors, arrays, sequences, or tuples, dicts and dataclasses of them",
        got=got,
        cause="the last step of an epoch has fewer samples than there are ranks",
        fix="DataLoader(..., drop_last=True)",
    )
