# SPDX-License-Identifier: Apache-2.0
"""Counts, joins and slices the rows of batches of any structure.

A batch is a tensor or an array, a sequence of rows (strings, numbers), or a tree of batches (see
`tensor_tree`). A list or tuple is a sequence of rows when it holds nothing but plain values, else a
container; torch's ``default_collate`` makes batches like that. Any other object raises an error
that names its place in the batch: a guess could drop rows without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.errors import NotShardableError
from lockstep.tensor_tree import (
    PLAIN_TYPES,
    Key,
    KeyPath,
    children_of,
    is_rows,
    keystr,
    leaves_of,
    rebuild_container,
    tree_map_with_path,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def leading_length(batch: Any) -> int:
    """Number of rows: the leading length of the first tensor, array or sequence of rows.

    An empty one stands back behind those that have rows: a batch of graphs without a single edge
    is not a batch without samples.

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
        return len(batch) if is_rows(batch) else None
    found: int | None = None
    for _, child in children:
        length = _first_length(child)
        if length:
            return length
        found = length if found is None else found
    return found


def count_samples(batch: Any, num_asked: int) -> int:
    """Number of samples: the rows, mostly; where time steps come first, the second dimension.

    Torch's recurrent layers take ``(T, N, ...)``, and T, the longest sequence of the batch, is not
    what a mean over N samples counts for. Shapes alone do not tell ``(T, N, F)`` with N targets
    from ``(N, T, F)`` with T points of time. It is told by the samples for which the dataset was
    asked: all tensors but the first have so many rows, and the first so many columns.

    Args:
        num_asked: the samples for which the dataset was asked. One shows little: a dimension of
            one is common.

    Raises:
        NotShardableError: nothing in the batch has a length.
    """
    rows = leading_length(batch)
    if rows == num_asked:
        return rows
    tensors = [
        leaf
        for leaf in leaves_of(batch)
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim
    ]
    if len(tensors) < 2 or tuple(tensors[0].shape[:2]) != (rows, num_asked):
        return rows
    return num_asked if all(len(each) == num_asked for each in tensors[1:]) else rows


def concatenate(batches: Sequence[Any]) -> Any:
    """Join `batches`, which have equal structures, to one batch with all their rows in order.

    Raises:
        NotShardableError: a place in the batches cannot be joined; the message names it.
    """
    return batches[0] if len(batches) == 1 else _join(list(batches), ())


def _join(parts: list[Any], path: KeyPath) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _join_error("joined", path, ", ".join(type(part).__name__ for part in parts))
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _join_arrays(parts, path)
    children = children_of(first)
    if children is None:
        return _join_plain(parts, path)
    columns = [[_child(part, key, path) for part in parts] for key, _ in children]
    joined = [
        _join(column, (*path, key)) for column, (key, _) in zip(columns, children, strict=True)
    ]
    return rebuild_container(first, joined)


def _join_arrays(parts: list[Any], path: KeyPath) -> Any:
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    if any(part.ndim == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise _join_error("joined along dim 0", path, f"shapes {shapes}")
    try:
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return torch.cat(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _join_error("joined along dim 0", path, f"shapes {shapes}: {error}") from error


def _join_plain(parts: list[Any], path: KeyPath) -> Any:
    first = parts[0]
    if is_rows(first):
        return type(first)(row for part in parts for row in part)
    # A value that belongs to no row (a name, a scale) must be the same in all parts.
    if isinstance(first, PLAIN_TYPES) and all(part == first for part in parts):
        return first
    raise _join_error("joined", path, f"a {type(first).__name__}")


def slice_rows(batch: Any, rows: slice) -> Any:
    """The rows `rows` of `batch`, in the same structure; ``slice(0)`` takes none.

    Raises:
        NotShardableError: a place in the batch cannot be sliced; the message names it.
    """

    def slice_leaf(path: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            try:
                return leaf[rows]
            except (RuntimeError, IndexError, NotImplementedError) as error:
                raise _slice_error(path, f"{type(leaf).__name__}: {error}") from error
        if is_rows(leaf):
            return leaf[rows]
        if isinstance(leaf, PLAIN_TYPES):
            return leaf
        raise _slice_error(path, f"a {type(leaf).__name__}")

    return tree_map_with_path(slice_leaf, batch)


def _child(batch: Any, key: Key, path: KeyPath) -> Any:
    for own, child in children_of(batch) or []:
        if own == key:
            return child
    raise _join_error("joined", path, f"a {type(batch).__name__} without {key}")


def _join_error(verb: str, path: KeyPath, got: str) -> NotShardableError:
    place = f"batch{keystr(path)}"
    return NotShardableError(
        f"{place} cannot be {verb}: a worker's shards have to become one batch",
        where=place,
        expected="tensors or arrays that differ in dim 0 only, or equal structures of them",
        got=got,
        fix="use a map-style dataset with batch_size=..., or one shard per worker "
        "(num_shards equal to num_workers)",
    )


def _slice_error(path: KeyPath, got: str) -> NotShardableError:
    place = f"batch{keystr(path)}"
    return NotShardableError(
        f"rows of {place} cannot be taken, and a rank without samples takes zero of them",
        where=place,
        expected="tensors, arrays, sequences, or tuples, dicts and dataclasses of them",
        got=got,
        cause="the last step of an epoch has fewer samples than there are ranks",
        fix="DataLoader(..., drop_last=True)",
    )
