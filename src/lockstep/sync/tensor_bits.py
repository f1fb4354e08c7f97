# SPDX-License-Identifier: Apache-2.0
"""Comparing tensors of any layout by their bits.

``torch.equal`` does not do: a NaN is not equal to itself, zero has two signs, and most kinds of
sparse tensors cannot be compared at all.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch

from lockstep._torch_compat import sparse_indices_and_values
from lockstep.tensor_copies import as_bytes, is_block

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE: Final = 1 << 18
"""Words that `sum_of_bits` adds at a time."""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; a NaN equals the same NaN."""
    kinds = [(x.layout, x.dtype, x.is_quantized, x.is_nested) for x in (one, other)]
    if kinds[0] != kinds[1] or (not one.is_nested and one.shape != other.shape):
        return False
    if one.is_quantized:
        return torch.equal(one, other)  # also compares scales and zero points
    if is_block(one):
        return torch.equal(as_bytes(one), as_bytes(other))
    pairs = list(zip_longest(_blocks_of(one), _blocks_of(other)))
    return all(a is not None and b is not None and same_bits(a, b) for a, b in pairs)


def _blocks_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The strided tensors that a sparse or nested tensor consists of."""
    if tensor.is_nested:
        return tensor.detach().unbind()
    if tensor.layout is torch.sparse_coo:
        return sparse_indices_and_values(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def sum_of_bits(tensor: torch.Tensor | None) -> int:
    """A checksum: tensors with other bits hardly ever have the same one by chance."""
    if tensor is None:
        return -1
    flat = as_bytes(tensor.to_dense() if tensor.layout is not torch.strided else tensor)
    if flat.storage_offset() % 4:  # a view of small elements may begin in the middle of a word
        flat = flat.clone()
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    # By pieces: torch makes a copy of twice the size to add integers in a wider type.
    sums = [piece.sum(dtype=torch.int64) for piece in words.split(_PIECE)]
    return int(torch.stack(sums).sum())
