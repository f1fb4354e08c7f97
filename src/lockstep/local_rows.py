# SPDX-License-Identifier: Apache-2.0
"""`LocalRows`: the rows that a rank has of a tensor which the ranks share out."""

from __future__ import annotations

import torch


def first_row(length: int, rank: int, num_ranks: int) -> int:
    """The first of the rows that `rank` keeps of `length` rows; `length` where it keeps none."""
    return min(rank * -(-length // num_ranks), length)


def rows_of(whole: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """The rows of a tensor that `rank` keeps; may be none."""
    length = whole.shape[0]
    return whole[first_row(length, rank, num_ranks) : first_row(length, rank + 1, num_ranks)]


class LocalRows:
    """Rows of a whole tensor that other ranks have the rest of; a `DTensor` without a mesh.

    Attributes:
        rows: on the CPU.
        shape: of the whole tensor.
        first: the place of the first row in the whole tensor.
    """

    def __init__(self, rows: torch.Tensor, shape: torch.Size, first: int) -> None:
        self.rows = rows
        self.shape = shape
        self.first = first

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype, rank: int, num_ranks: int) -> LocalRows:
        """The rows that `rank` has among `num_ranks` ranks, without values."""
        like = rows_of(torch.empty(shape, dtype=dtype, device="meta"), rank, num_ranks)
        first = first_row(shape[0], rank, num_ranks)
        return cls(torch.empty_like(like, device="cpu"), shape, first)

    def take_from(self, other: LocalRows) -> None:
        """Copy the rows that both have."""
        first = max(self.first, other.first)
        last = min(self.first + len(self.rows), other.first + len(other.rows))
        if first < last:
            rows = other.rows[first - other.first : last - other.first]
            self.rows[first - self.first : last - self.first] = rows
