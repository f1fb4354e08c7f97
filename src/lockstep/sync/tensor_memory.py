# SPDX-License-Identifier: Apache-2.0
"""Copying and comparing tensors of every kind: strided, sparse, quantized, nested, expanded.

``Tensor.copy_`` and ``torch.equal`` refuse or mistake some of these kinds: several elements of an
expanded tensor are one number in memory, a NaN is not equal to itself, and a sparse tensor has no
memory of its own. The functions here treat all of them, and take the quick way for the plain ones.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE: Final = 1 << 18
"""Words that `sum_of_bits` adds at a time."""


def is_block(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is numbers in memory and strides, nothing else."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def is_expanded(block: torch.Tensor) -> bool:
    """Whether several elements of `block` are one number in memory (``Tensor.expand``)."""
    return any(
        not stride and size > 1 for size, stride in zip(block.shape, block.stride(), strict=True)
    )


def fits(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the numbers of `value` can take the place of those of `tensor`."""
    are_blocks = is_block(value) and is_block(tensor)
    return are_blocks and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)


def as_bytes(block: torch.Tensor) -> torch.Tensor:
    """The numbers of `block` as flat uint8: a view of its memory where it is contiguous."""
    plain = block.detach().resolve_conj().resolve_neg().contiguous()
    # torch calls a lone number contiguous whatever its stride is, and `view` does not.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def write_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite `tensor` with `value`, also where `tensor` is expanded."""
    if not is_block(tensor):
        # Not through `detach`: a sparse tensor holds its numbers itself, and would keep its own.
        with torch.no_grad():
            tensor.copy_(value)
        return
    target = tensor.detach()
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def overwrite(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Overwrite each of `targets` with its counterpart, the plain ones in one call of torch."""
    plain: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            if _is_plain(target):
                plain.append(target)
                theirs.append(value)
            else:
                write_into(target, value)
        if plain:
            torch._foreach_copy_(plain, theirs)


def _is_plain(tensor: torch.Tensor) -> bool:
    if not is_block(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    return not is_expanded(tensor)


def copy_over(values: Sequence[torch.Tensor], into: list[torch.Tensor]) -> None:
    """Make `into` copies of `values`, in the memory of its tensors where they fit.

    Without waiting for the device, and after the first call usually without allocating.
    """
    if len(values) != len(into):
        into.clear()
    places = [
        n for n, (value, old) in enumerate(zip(values, into, strict=False)) if fits(value, old)
    ]
    overwrite([into[n] for n in places], [values[n] for n in places])
    held = {n: into[n] for n in places}
    into[:] = [held[n] if n in held else value.detach().clone() for n, value in enumerate(values)]


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
        return tensor._indices(), tensor._values()
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
