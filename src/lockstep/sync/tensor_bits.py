# SPDX-License-Identifier: Apache-2.0
"""Comparing tensors of any layout by their bits.

``torch.equal`` does not do: a NaN is not equal to itself, zero has two signs, and most kinds of
sparse tensors cannot be compared at all.
"""

from __future__ import annotations

from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch

from lockstep._torch_compat import sparse_indices_and_values
from lockstep.tensor_copies import as_bytes, is_block

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE: Final = 1 << 18
"""Words that `sum_of_bits` adds at a time."""

_FACTOR: Final = 0x9E3779B97F4A7C15
"""By whose powers the sums of pieces are multiplied: an odd number, 2**64 over the golden ratio."""


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
    """A checksum: tensors with other bits hardly ever have the same one by chance.

    Each word counts by its place: rows in another order, as of a vocabulary that each rank has
    built from a set, are other bits. Of zeros the sum is 0.
    """
    if tensor is None:
        return -1
    flat = as_bytes(tensor.to_dense() if tensor.layout is not torch.strided else tensor)
    if flat.storage_offset() % 4:  # a view of small elements may begin in the middle of a word
        flat = flat.clone()
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    places = _odd_numbers(words.device)
    # By pieces: torch makes a copy of twice the size to multiply integers in a wider type.
    sums = [(piece * places[: len(piece)]).sum() for piece in words.split(_PIECE)]
    total = 0
    for number in torch.stack(sums).tolist():
        total = (total * _FACTOR + number) % 2**62
    return total


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * _PIECE, 2, device=device)
