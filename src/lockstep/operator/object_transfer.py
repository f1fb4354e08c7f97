# SPDX-License-Identifier: Apache-2.0
"""`transfer` sends an object from one rank to another one, `all_gather` those of all to all."""

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
    fix = "a collate_fn that makes tensors; or leave shadow_every out"
    is_sent = group.rank == source
    sent, sizes = _messages(value, "a batch", fix) if is_sent else (_nothing(), [])
    sizes = group.exchange(sizes)[source]
    is_here = group.rank == destination
    received = send_bytes(group, sent, destination, source, sum(sizes) if is_here else 0)
    return _value_in(received, sizes) if is_here else None


def all_gather(group: Group, value: Any, what: str) -> list[Any]:
    """The `value` of every rank, by rank; their tensors arrive on the CPU.

    Args:
        value: of any size, which may differ between ranks.
        what: the value's name in the error.

    Gradient:
        None: not differentiable.

    Collective:
        Every rank. Blocks. One exchange, and one all-gather of as much as the largest value.

    Raises:
        NotPicklableError: on the rank whose value cannot be sent.
        PeerLostError: another rank went away.
    """
    own, sizes = _messages(value, what, "make it of tensors and of what can be pickled")
    by_rank = group.exchange(sizes)
    padded = torch.zeros(max(map(sum, by_rank)), dtype=torch.uint8, device="cpu")
    padded[: len(own)] = own
    gathered = group.all_gather(padded.to(group.device))
    return [
        _value_in(one[: sum(sizes)].cpu(), sizes)
        for one, sizes in zip(gathered, by_rank, strict=True)
    ]


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


def _messages(value: Any, what: str, fix: str) -> tuple[torch.Tensor, list[int]]:
    """The bytes of `value`: first its structure, then its tensors; and their sizes."""
    try:
        structure, buffers = split(value, keeps_places=True)
    # Whatever a user's __reduce__ raises; the usual ones are TypeError and PicklingError.
    except Exception as error:
        raise NotPicklableError(
            f"{what} cannot be sent to another worker",
            got=f"{type(error).__name__}: {error}",
            fix=fix,
        ) from error
    head = pickle.dumps((structure, [buffer.numel() for buffer in buffers]))
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), pack(buffers)]
    return torch.cat(parts), [part.numel() for part in parts]


def _value_in(message: torch.Tensor, sizes: list[int]) -> Any:
    head, block = message.split(sizes)
    structure, buffer_sizes = pickle.loads(head.numpy().tobytes())
    # A copy: a tensor begins at a multiple of its element, which the length of the head is not.
    return join(structure, unpack(block.clone(), buffer_sizes))


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
