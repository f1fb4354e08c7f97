# SPDX-License-Identifier: Apache-2.0
"""Counts and slices the rows of batches of any structure.

A batch is a tensor or an array, a sequence of rows (strings, numbers), or a tree of batches (see
`tensor_tree`). A list or tuple is a sequence of rows when it holds nothing but plain values, or one
member for each sample (see `sample_lists`); else it is a container, as torch's ``default_collate``
makes them. Any other object raises an error that names its place in the batch: a guess could drop
rows without a word.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.data.sample_lists import UNKNOWN_MEMBERS, Members, members_of, sample_lists
from lockstep.errors import NotShardableError, WeightError
from lockstep.keys import WEIGHT
from lockstep.tensor_tree import (
    PLAIN_TYPES,
    KeyPath,
    children_of,
    is_rows,
    keystr,
    leaves_of,
    leaves_with_path,
    rebuild_container,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def leading_length(batch: Any) -> int:
    """Number of rows: the leading length of the first tensor, array or sequence of rows.

    Raises:
        NotShardableError: nothing in the batch has rows.
    """
    found = rows_of(batch)
    if found is None:
        raise NotShardableError(
            "the number of samples in a batch cannot be read from it",
            expected="a tensor, array or sequence somewhere in the batch",
            got=type(batch).__name__,
            cause="an object of any other class has no rows; its `len` may be anything",
            fix="yield batches of tensors (tuples, dicts and dataclasses of them are fine), or let"
            " a DataLoader with batch_size=... make the batches from samples",
        )
    return found


def rows_of(batch: Any) -> int | None:
    """As `leading_length`; None where nothing in the batch has rows.

    An empty tensor stands back behind those that have rows: a batch of graphs without a single
    edge is not a batch without samples.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # every sequence has a first step
    children = children_of(batch)
    if children is None:
        return len(batch) if is_rows(batch) else None
    found: int | None = None
    for _, child in children:
        length = rows_of(child)
        if length:
            return length
        found = length if found is None else found
    return found


def rows_error(batch: Any) -> WeightError | None:
    """The error to raise where `batch` counts for its rows and nothing else shows its samples.

    None if it may. It may not where `rows_of` are those of one member in a list whose members are
    alike and have unequal rows: as columns they would have equally many.
    """
    place = batch
    while (children := children_of(place)) is not None:
        lengths = [rows_of(child) for _, child in children]
        if members_of(place, None) is Members.EITHER and len(set(lengths)) > 1:
            return WeightError(
                "the number of samples in a batch is not known",
                expected="tensors with a row for each sample, or a list of as many samples as the"
                " loader asks for",
                got=f"a {type(place).__name__} of {len(lengths)} with lengths {lengths[:8]}",
                cause="the batch is a list of samples; a collate_fn left some out, or nothing says"
                " how many there should be",
                fix="return from compute_loss, beside the loss,"
                f" {{{WEIGHT!r}: number_of_samples}}; or let a DataLoader with batch_size=... make"
                " the batches",
            )
        place = next((child for _, child in children if rows_of(child)), None)
    return None


def count_samples(batch: Any, num_asked: int) -> int:
    """Number of samples: the rows, mostly; of a list of samples the members.

    Torch's recurrent layers take ``(T, N, ...)``, and T, the longest sequence of the batch, is not
    what a mean over N samples counts for. Shapes alone do not tell ``(T, N, F)`` with N targets
    from ``(N, T, F)`` with T points of time. It is told by the samples for which the dataset was
    asked: all tensors but the first have so many rows, and the first so many columns. They tell a
    list of samples as well, and are the only thing to go by where nothing in the batch has rows.

    Args:
        num_asked: the samples for which the dataset was asked. One shows little, a dimension of
            one being common; see `count_one`.
    """
    rows = rows_of(batch)
    if rows in (num_asked, 0):
        return rows
    if rows is None or any(sample_lists(batch, num_asked)):
        return num_asked
    tensors = [
        leaf
        for leaf in leaves_of(batch)
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim
    ]
    if len(tensors) < 2 or tuple(tensors[0].shape[:2]) != (rows, num_asked):
        return rows
    return num_asked if all(len(each) == num_asked for each in tensors[1:]) else rows


def count_one(batch: Any) -> int:
    """Number of samples where the dataset was asked for one, which may be a ready batch.

    A tuple of one tensor is mostly the item of a dataset with one column.
    """
    rows = rows_of(batch)
    has_one_column = isinstance(batch, tuple) and len(batch) == 1
    if rows is None or (not has_one_column and any(sample_lists(batch, 1))):
        return 1
    return rows


def count_kept_samples(batch: Any, delivered: Any, num_samples: int) -> int | None:
    """Number of samples in `batch`, which a loop has made from the batch `delivered`.

    A loop may move, augment, transpose, repeat, collate or cut samples. The first dimension of one
    tensor is a guess (it may be time), so all samples are there until every tensor, or every list
    of samples, shows that there are fewer. A tensor with exactly `num_samples` rows, whatever the
    rows are, means all.

    Args:
        num_samples: of `delivered`; a made batch cannot have more.

    Returns:
        None where neither rows nor the members of a list show the samples.
    """
    lists = list(sample_lists(delivered, num_samples))
    lengths = {_list_length(batch, delivered, path) for path, _ in lists}
    if not lists or None in lengths:
        if any(sample_lists(batch, num_samples)):
            return num_samples
        return _count_kept_rows(batch, None if lists else delivered, num_samples)
    (length, *others) = lengths
    is_sure = lists[0][1] is Members.SAMPLES or length == rows_of(batch)
    return length if is_sure and not others and (length or 0) <= num_samples else None


def _list_length(batch: Any, delivered: Any, path: KeyPath) -> int | None:
    """The members of the list of samples at `path`; None where `batch` has no such list there."""
    for key in path:
        batch, delivered = (dict(children_of(each) or ()).get(key) for each in (batch, delivered))
    if not isinstance(batch, list | tuple):
        return None
    # Of samples that the loop has collated, columns may stand there.
    is_alike = {_kind_of_sample(each) for each in batch} <= set(map(_kind_of_sample, delivered))
    return len(batch) if is_alike else None


def _kind_of_sample(member: Any) -> Any:
    return member.ndim if isinstance(member, (torch.Tensor, np.ndarray)) else type(member)


def _count_kept_rows(batch: Any, delivered: Any, num_samples: int) -> int | None:
    """As `count_kept_samples`, by the shapes of what has rows; `delivered` is None if it is lists
    of samples."""
    shapes, before = _shapes_with_rows(batch), _shapes_with_rows(delivered)
    lengths, lengths_before = ({shape[0] for shape in each} for each in (shapes, before))
    if num_samples in map(rows_of, leaves_of(batch)):
        return num_samples
    is_second = _have_samples_second(shapes, before, num_samples)
    was_second = any(shape[1:2] == (num_samples,) for shape in before)
    is_uncut = lengths_before <= lengths if before else delivered is not None and not shapes
    if (is_uncut and not was_second) or (shapes and all(is_second)):
        return num_samples
    if len(lengths) != 1:
        return num_samples if any(is_second) else None
    # Rows that were nodes or steps of time show nothing by their number.
    if lengths_before != {num_samples} or any(is_second):
        return None
    (length,) = lengths
    if length < num_samples:
        return length
    return num_samples if length % num_samples == 0 else None  # views of each sample


def _have_samples_second(
    shapes: list[tuple[int, ...]], before: list[tuple[int, ...]], num_samples: int
) -> list[bool]:
    """Which of `shapes` have the samples in their second dimension, behind the steps of time.

    A second dimension of so many may be features or channels that were there beside the samples,
    or tokens that a cut has left by chance. So the first one shows the steps: they were there
    before, are too many to be kept samples, or stand in front of a delivered tensor's whole shape;
    or what was delivered has no rows of samples either.
    """
    firsts = {length for shape in before for length in shape[:2]}
    had_rows = any(shape[0] == num_samples for shape in before)
    is_deeper = max(map(len, shapes), default=0) > max(map(len, before), default=0)

    def has_steps_first(first: int, tail: tuple[int, ...]) -> bool:
        is_in_front = is_deeper and tail in before
        return first > num_samples or first in firsts or is_in_front or not had_rows

    return [
        shape[1:2] == (num_samples,)
        and (num_samples, *shape[1:]) not in before
        and has_steps_first(shape[0], shape[1:])
        for shape in shapes
    ]


def count_samples_of_any(batch: Any, counts: Collection[int], *, are_rows: bool) -> int | None:
    """Number of samples in `batch`, which a loop has made from one of several batches.

    Args:
        counts: the numbers of samples in these batches.
        are_rows: the samples are rows of tensors, and no members of lists.

    Returns:
        None where it is not known.
    """
    rows = set(map(rows_of, leaves_of(batch)))
    shown = {each for each in counts if each in rows or any(sample_lists(batch, each))}
    if not shown and are_rows:
        shown = {shape[0] for shape in _shapes_with_rows(batch)}
    return shown.pop() if len(shown) == 1 and max(shown) <= max(counts) else None


def _shapes_with_rows(batch: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors and arrays in `batch`; the lengths of other rows if it has none.

    Those without a single row (graphs without edges) only where no other has one; those of one
    element (the share of a mixup) only where no other has several rows.
    """
    leaves = list(leaves_of(batch))
    arrays = [each for each in leaves if isinstance(each, (torch.Tensor, np.ndarray))]
    shapes = [tuple(each.shape) for each in arrays if each.ndim]
    shapes += [(rows_of(each) or 0,) for each in leaves if isinstance(each, PackedSequence)]
    shapes = shapes or [(rows,) for each in leaves if (rows := rows_of(each)) is not None]
    if any(shape[0] > 1 for shape in shapes):
        shapes = [shape for shape in shapes if math.prod(shape) != 1]
    return [shape for shape in shapes if shape[0]] or shapes


def slice_rows(batch: Any, rows: slice, num_samples: int | None = None) -> Any:
    """The rows `rows` of `batch`, in the same structure.

    Args:
        num_samples: of `batch`. Lists of so many samples are cut as well, unless they may be
            columns. If None: all lists of tensors are columns.

    Raises:
        NotShardableError: a place in the batch cannot be sliced; the message names it.
    """

    def is_list(tree: Any, _: KeyPath) -> bool:
        return num_samples is not None and members_of(tree, num_samples) is Members.SAMPLES

    return _slice_all(batch, rows, num_samples, is_list)


def without_samples(batch: Any, num_samples: int | None) -> Any:
    """None of the samples of `batch`, in the same structure.

    Args:
        num_samples: of `batch`; None where nothing tells it.

    Raises:
        NotShardableError: what belongs to the samples in some place cannot be told, or cannot be
            taken away; the message names it.
    """

    def is_list(tree: Any, path: KeyPath) -> bool:
        members = members_of(tree, num_samples)
        if members is Members.EITHER:
            raise _slice_error(path, UNKNOWN_MEMBERS)
        return members is Members.SAMPLES

    return _slice_all(batch, slice(0), num_samples, is_list)


def _slice_all(
    batch: Any,
    rows: slice,
    num_samples: int | None,
    is_list: Callable[[Any, KeyPath], bool],
) -> Any:
    sliced = _slice(batch, rows, num_samples, is_list, ())
    has_lists = num_samples is not None and any(sample_lists(batch, num_samples))
    if rows_of(batch) is None and not has_lists:
        for path, leaf in leaves_with_path(batch):
            if isinstance(leaf, (torch.Tensor, np.ndarray)):
                raise _slice_error(path, f"{type(leaf).__name__} without dimensions, and no rows")
    return sliced


def _slice(
    tree: Any,
    rows: slice,
    num_samples: int | None,
    is_list: Callable[[Any, KeyPath], bool],
    path: KeyPath,
) -> Any:
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        if not tree.ndim:
            return tree  # it belongs to no sample: the share of a mixup
        try:
            return tree[rows]
        except (RuntimeError, IndexError, NotImplementedError) as error:
            raise _slice_error(path, f"{type(tree).__name__}: {error}") from error
    children = children_of(tree)
    if children is not None:
        if is_list(tree, path):
            return tree[rows]
        values = [
            _slice(child, rows, num_samples, is_list, (*path, key)) for key, child in children
        ]
        return rebuild_container(tree, values)
    if is_rows(tree):
        # So many values belong to no sample: the size of all images, say.
        return tree[rows] if num_samples in (None, len(tree)) else tree
    if isinstance(tree, PLAIN_TYPES):
        return tree
    raise _slice_error(path, f"a {type(tree).__name__}")


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
