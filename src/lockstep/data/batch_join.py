# SPDX-License-Identifier: Apache-2.0
"""Joins batches of one structure, of any kind (see `batch_rows`), to one batch."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.data.batch_rows import rows_of
from lockstep.data.sample_lists import UNKNOWN_MEMBERS, Members, members_of
from lockstep.errors import NotShardableError
from lockstep.tensor_tree import (
    PLAIN_TYPES,
    Key,
    KeyPath,
    children_of,
    is_rows,
    keystr,
    rebuild_container,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_Counts = list[int | None]
"""For each of the batches that are joined its samples; None where nothing tells them."""


def concatenate(batches: Sequence[Any]) -> Any:
    """Join `batches`, whose tensors all have rows along dim 0, to one batch with all rows in order.

    Raises:
        NotShardableError: a place in the batches cannot be joined; the message names it.
    """
    return batches[0] if len(batches) == 1 else _join(list(batches), None, ())


def join_batches(batches: Sequence[Any], num_samples: Sequence[int | None]) -> Any:
    """Join `batches`, as a loader made them, to one batch with all their samples in order.

    Lists of columns are joined column by column, and lists of samples behind each other.

    Args:
        num_samples: of each batch the samples for which the loader asked; None where it does not
            say so.

    Raises:
        NotShardableError: a place in the batches cannot be joined, or it cannot be told how; the
            message names it.
    """
    if len(batches) == 1:
        return batches[0]
    return _join(list(batches), list(num_samples), ())


def _join(parts: list[Any], counts: _Counts | None, path: KeyPath) -> Any:
    """Join `parts`; without `counts` all lists are columns."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _join_error("joined", path, ", ".join(type(part).__name__ for part in parts))
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _join_arrays(parts, path)
    children = children_of(first)
    if children is None:
        return _join_plain(parts, counts, path)
    if counts is not None and _are_sample_lists(parts, counts, path):
        return type(first)(chain.from_iterable(parts))
    columns = _columns(parts, path)
    joined = [_join(columns[key], counts, (*path, key)) for key, _ in children]
    return rebuild_container(first, joined)


def _are_sample_lists(parts: list[Any], counts: _Counts, path: KeyPath) -> bool:
    """Whether the members of all `parts` are samples, as at least one of them shows.

    Raises:
        NotShardableError: no part shows it, or they contradict each other.
    """
    pairs = zip(parts, counts, strict=True)
    found = {members_of(part, count) for part, count in pairs} - {Members.EITHER}
    if not found and counts == [None] * len(parts) and all(map(_have_equal_rows, parts)):
        return False  # a ready batch counts for its rows, so that members with rows are columns
    if len(found) != 1:
        raise _join_error("joined", path, UNKNOWN_MEMBERS)
    return Members.SAMPLES in found


def _have_equal_rows(part: Any) -> bool:
    return len({rows_of(child) for _, child in children_of(part) or ()}) == 1


def _columns(parts: list[Any], path: KeyPath) -> dict[Key, list[Any]]:
    """By its key, each child of all `parts`."""
    by_part = [dict(children_of(part) or ()) for part in parts]
    for children in by_part:
        for key in by_part[0].keys() ^ children.keys():
            raise _join_error("joined", path, f"a {type(parts[0]).__name__} without {key}")
    return {key: [children[key] for children in by_part] for key in by_part[0]}


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


def _join_plain(parts: list[Any], counts: _Counts | None, path: KeyPath) -> Any:
    first = parts[0]
    if is_rows(first):
        pairs = zip(parts, counts or [None] * len(parts), strict=True)
        if all(count in (None, len(part)) for part, count in pairs):
            return type(first)(chain.from_iterable(parts))
    # A value that belongs to no row (a name, a scale) must be the same in all parts.
    if (is_rows(first) or isinstance(first, PLAIN_TYPES)) and all(part == first for part in parts):
        return first
    raise _join_error("joined", path, f"a {type(first).__name__}")


def _join_error(verb: str, path: KeyPath, got: str) -> NotShardableError:
    place = f"batch{keystr(path)}"
    fix = (
        "use a map-style dataset with batch_size=..., or one shard per worker "
        "(num_shards equal to num_workers)"
    )
    if got is UNKNOWN_MEMBERS:
        fix += "; or give columns names (a dict, a named tuple)"
    return NotShardableError(
        f"{place} cannot be {verb}: a worker's shards have to become one batch",
        where=place,
        expected="tensors or arrays that differ in dim 0 only, or equal structures of them",
        got=got,
        fix=fix,
    )
