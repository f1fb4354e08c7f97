# SPDX-License-Identifier: Apache-2.0
"""Broadcasts of many tensors in few messages, whatever their dtypes.

Tensors travel as bytes, several in one block: a backend need not know their dtypes (gloo has no
bool, float8 or complex). Only strided tensors travel so; see `tensor_copies.is_block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from lockstep.serialization import pack, packed_size, unpack
from lockstep.tensor_copies import as_bytes, write_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lockstep.group import Group

_LARGE: Final = 1 << 20
"""Bytes from which a tensor travels from where it lies: a copy is memory that stays taken."""


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
        for part in split_into_messages(tensors, cap_bytes):
            block = as_bytes(part[0]) if len(part) == 1 else make_block(part, group.rank == source)
            group.broadcast(block, source)
            if group.rank != source and block.data_ptr() != part[0].data_ptr():
                for tensor, value in zip(part, unpack_block(block, part), strict=True):
                    write_into(tensor, value)


def make_block(tensors: Sequence[torch.Tensor], is_source: bool) -> torch.Tensor:
    """One block of bytes for `tensors` of one device; filled with them on the source alone."""
    device = tensors[0].device
    if is_source:
        return pack([as_bytes(tensor) for tensor in tensors], device)
    return torch.empty(packed_size(_sizes(tensors)), dtype=torch.uint8, device=device)


def unpack_block(block: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The source's tensors in a block that was broadcast, as views; `like` are this rank's."""
    buffers = unpack(block, _sizes(like))
    return [
        buffer.view(tensor.dtype).view(tensor.shape)
        for buffer, tensor in zip(buffers, like, strict=True)
    ]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def split_into_messages(
    tensors: Iterable[torch.Tensor], cap_bytes: int
) -> Iterator[list[torch.Tensor]]:
    """`tensors` in the parts that travel together: of one device, no larger than `cap_bytes`.

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
