# SPDX-License-Identifier: Apache-2.0
"""Making every rank's tensors equal to one rank's: at attach, for buffers after a backward, and
for rows that one rank alone has stepped.

Tensors travel as bytes: one broadcast serves all dtypes (BatchNorm alone has two), and dtypes
that a backend cannot name (bool, float8, complex) need no special case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.group import Group


_LARGE: Final = 1 << 20
"""Bytes from which a tensor travels from where it lies: a copy is memory that stays taken."""


def broadcast_tensors(
    group: Group, tensors: Iterable[torch.Tensor], *, cap_bytes: int, source: int = 0
) -> None:
    """Overwrite `tensors` with those of rank `source`, in place.

    Args:
        group: the ranks.
        tensors: of the same shapes, dtypes and order on every rank.
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
        for pack in _packs(tensors, cap_bytes):
            pieces = [_as_bytes(tensor) for tensor in pack]
            message = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            group.broadcast(message, source)
            if group.rank != source and message.data_ptr() != pack[0].data_ptr():
                _unpack(message, pack)


def _packs(tensors: Iterable[torch.Tensor], cap_bytes: int) -> Iterator[list[torch.Tensor]]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        # Wide items first: then every slice of the message starts at a multiple of its item
        # size, as a view of another dtype must.
        members.sort(key=lambda tensor: -tensor.element_size())
        pack: list[torch.Tensor] = []
        filled = 0
        for tensor in members:
            size = tensor.numel() * tensor.element_size()
            if size >= _LARGE:
                yield [tensor]
                continue
            if pack and filled + size > cap_bytes:
                yield pack
                pack, filled = [], 0
            pack.append(tensor)
            filled += size
        if pack:
            yield pack


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _unpack(message: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        piece = message[offset : offset + size].view(tensor.dtype)
        tensor.detach().copy_(piece.view(tensor.shape))
        offset += size
