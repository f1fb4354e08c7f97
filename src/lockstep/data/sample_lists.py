# SPDX-License-Identifier: Apache-2.0
"""Tells a list of samples from a list of columns, by the number of samples in the batch.

torch's ``default_collate`` makes lists of columns: each member has a row for every sample. A
``collate_fn=list`` makes a list of samples, and ``tuple(zip(*samples))`` a tuple of such lists.
Rows of columns are joined, cut and counted in every member; samples are members themselves. Types
show nothing: both are lists or tuples of tensors. The number of samples does, as far as anybody
has told it: a list of samples has as many members, and columns have as many rows. Members of
several kinds are columns; so are members with names.

What both would fit is `Members.EITHER`, so that each caller has to say what it then does.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.tensor_tree import children_of, is_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.tensor_tree import KeyPath


UNKNOWN_MEMBERS: Final = "a list or tuple whose members may be samples or columns"
"""What an error says of members that may be either."""


class Members(Enum):
    """What the members of a list or tuple in a batch are."""

    COLUMNS = "columns, each with a row for every sample"
    SAMPLES = "samples"
    EITHER = "samples, or columns: their number and their rows fit both"


def members_of(tree: Any, num_samples: int | None) -> Members:
    """What the members of the container `tree` are.

    Args:
        tree: a place of a batch that has children, see `lockstep.tensor_tree.children_of`.
        num_samples: of the batch; None where nothing tells it. Several members that are alike
            may then be anything, and one is a column.
    """
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields"):
        return Members.COLUMNS
    if num_samples is None:
        may_be_samples = len(tree) > 1 and len({_kind(each, with_shape=True) for each in tree}) == 1
        return Members.EITHER if may_be_samples else Members.COLUMNS
    if len(tree) != num_samples or len({_kind(each) for each in tree}) != 1:
        return Members.COLUMNS
    has_rows = all(_may_be_column(each, num_samples) for each in tree)
    return Members.EITHER if has_rows else Members.SAMPLES


def sample_lists(
    batch: Any, num_samples: int, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Members]]:
    """The places of `batch` where a list may hold one member for each of `num_samples` samples."""
    children = children_of(batch)
    if children is None:
        return
    members = members_of(batch, num_samples)
    if members is not Members.COLUMNS:
        yield path, members
        return
    for key, child in children:
        yield from sample_lists(child, num_samples, (*path, key))


def _kind(member: Any, *, with_shape: bool = False) -> Any:
    if isinstance(member, torch.Tensor | np.ndarray):
        return member.dtype, tuple(member.shape[1:]) if with_shape else member.ndim
    return type(member)


def _may_be_column(member: Any, num_samples: int) -> bool:
    """Whether `member` has something for each sample: rows, or a list."""
    if isinstance(member, torch.Tensor | np.ndarray):
        return bool(member.ndim) and member.shape[0] == num_samples
    if isinstance(member, PackedSequence):
        return int(member.batch_sizes[0]) == num_samples
    children = children_of(member)
    if children is None:
        return is_rows(member) and len(member) == num_samples
    if isinstance(member, list | tuple) and len(member) == num_samples:
        return True
    return all(_may_be_column(child, num_samples) for _, child in children)
