# SPDX-License-Identifier: Apache-2.0
"""Several tensors as one block of bytes: one message for all of them, whatever their dtypes.

As bytes a tensor needs no dtype that a backend can name (bool, float8 and complex numbers have
none on gloo), and a parameter server's message needs no pickle of anything large. Only strided
tensors can be packed; see `tensor_memory.is_block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from lockstep.sync.tensor_memory import as_bytes, write_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lockstep.group import Group

_ALIGNMENT: Final = 16
"""Every tensor begins at a multiple of it, where an element of any dtype may."""

_LARGE: Final = 1 << 20
"""Bytes from which a tensor travels from where it lies: a copy is memory that stays taken."""

Spec = list[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors in a block: what is needed to read it."""


def pack(
    tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu"
) -> tuple[Spec, torch.Tensor]:
    """Copy `tensors` into one block of bytes on `device`; see `unpack`."""
    spec: Spec = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    size = sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors)
    block = torch.empty(size, dtype=torch.uint8, device=device)
    with torch.no_grad():
        for tensor, place in zip(tensors, unpack(spec, block), strict=True):
            place.copy_(tensor)
    return spec, block


def unpack(spec: Spec, block: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that `block` holds, as views into it."""
    found: list[torch.Tensor] = []
    offset = 0
    for shape, dtype in spec:
        size = dtype.itemsize
        for length in shape:
            size *= length
        found.append(block[offset : offset + size].view(dtype).view(shape))
        offset += _padded(size)
    return found


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def parts_of(tensors: Iterable[torch.Tensor], cap_bytes: int) -> Iterator[list[torch.Tensor]]:
    """`tensors` in the parts that are to be packed: of one device, no larger than `cap_bytes`.

    A large tensor is a part of its own; empty tensors are in none.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        part: list[torch.Tensor] = []
        filled = 0
        for tensor in members:
            size = tensor.numel() * tensor.element_size()
            if size >= _LARGE:
                yield [tensor]
                continue
            if part and filled + size > cap_bytes:
                yield part
                part, filled = [], 0
            part.append(tensor)
            filled += size
        if part:
            yield part


def broadcast_tensors(
    group: Group, tensors: Iterable[torch.Tensor], *, cap_bytes: int, source: int = 0
) -> None:
    """Overwrite `tensors` with those of rank `source`, in place.

    Args:
        group: the ranks.
        tensors: strided; of the same shapes, dtypes and order on every rank.
        cap_bytes: the most that is packed into one message.

    Gradient:
        None: runs without recording.

    Collective:
        Every rank. Blocks. One broadcast per large tensor, and per device and `cap_bytes`.

    Raises:
        PeerLostError: another rank went away.
    """
    if group.is_alone:
        return
    with torch.no_grad():
        for part in parts_of(tensors, cap_bytes):
            if len(part) == 1:
                (tensor,) = part
                block = as_bytes(tensor)
                values = [block.view(tensor.dtype).view(tensor.shape)]
            else:
                spec, block = pack(part, part[0].device)
                values = unpack(spec, block)
            group.broadcast(block, source)
            if group.rank != source and block.data_ptr() != part[0].data_ptr():
                for tensor, value in zip(part, values, strict=True):
                    write_into(tensor, value)
