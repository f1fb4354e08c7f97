# SPDX-License-Identifier: Apache-2.0
"""`transfer`: sends an object from one rank to another one."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from lockstep.errors import NotPicklableError
from lockstep.serialization import join, pack, split, unpack

if TYPE_CHECKING:
    from lockstep.group import Group


def transfer(group: Group, value: Any, *, source: int, destination: int) -> Any:
    """Send `value`, whose tensors arrive on the CPU, from rank `source` to rank `destination`.

    Tensors that are there already keep their strides and alignment: see `split`.

    Args:
        value: what `source` sends; on other ranks it is ignored.

    Returns:
        The value on `destination`; None elsewhere.

    Gradient:
        None: not differentiable.

    Collective:
        Every rank. Blocks. One exchange, and one all-to-all that only the two ranks have rows in.

    Raises:
        NotPicklableError: on `source` alone.
        PeerLostError: another rank went away.
    """
    sent, sizes = _messages(value) if group.rank == source else (_nothing(), [])
    sizes = group.exchange(sizes)[source]
    is_here = group.rank == destination
    received = send_bytes(group, sent, destination, source, sum(sizes) if is_here else 0)
    if not is_here:
        return None
    head, block = received.split(sizes)
    structure, buffer_sizes = pickle.loads(head.numpy().tobytes())
    # A copy: a tensor begins at a multiple of its element, which the length of the head is not.
    return join(structure, unpack(block.clone(), buffer_sizes))


def send_bytes(
    group: Group, message: torch.Tensor, to: int, source: int, size: int
) -> torch.Tensor:
    """Send `message`, bytes on the CPU, to rank `to`; returns the `size` bytes of rank `source`.

    Gradient:
        None: not differentiable.

    Collective:
        Every rank. One all-to-all, in which a rank may send nothing, or receive nothing.
    """
    received = torch.empty(size, dtype=torch.uint8, device=group.device)
    received_rows, sent_rows = [0] * group.size, [0] * group.size
    received_rows[source], sent_rows[to] = size, message.numel()
    group.all_to_all(received, message.to(group.device), received_rows, sent_rows)
    return received.cpu()


def _messages(value: Any) -> tuple[torch.Tensor, list[int]]:
    """The bytes of `value`: first its structure, then its tensors; and their sizes."""
    try:
        structure, buffers = split(value, keeps_places=True)
    # Whatever a user's __reduce__ raises; the usual ones are TypeError and PicklingError.
    except Exception as error:
        raise NotPicklableError(
            "a batch cannot be sent to another worker",
            got=f"{type(error).__name__}: {error}",
            fix="a collate_fn that makes tensors; or leave shadow_every out",
        ) from error
    head = pickle.dumps((structure, [buffer.numel() for buffer in buffers]))
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), pack(buffers)]
    return torch.cat(parts), [part.numel() for part in parts]


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
