# SPDX-License-Identifier: Apache-2.0
"""Making every rank's tensors equal to one rank's: at attach, for buffers after a backward, and
for rows that one rank alone has stepped.

Tensors travel as bytes: one broadcast serves all dtypes (BatchNorm alone has two), and dtypes
that a backend cannot name (bool, float8, complex) need no special case. What is no block of
memory (sparse, quantized, nested) travels as torch writes it into a file.

A buffer may be part of a graph whose backward is still to come: two forwards, then two
backwards. What such a graph has saved is not written. A buffer that is equal already stays as it
is; another one is exchanged for a new tensor, and the graph keeps the old one.
"""

from __future__ import annotations

import io
import json
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import NotAvailableError
from lockstep.sync.tensor_references import has_aliases, is_in_graph
from lockstep.tensor_copies import as_bytes, fits, is_block, write_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lockstep.group import Group
    from lockstep.sync.inventory import BufferPlace


_HEAD: Final = 16
"""Bytes before the first buffer: what follows them may be of any dtype."""

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
            pieces = [as_bytes(tensor) for tensor in pack]
            message = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            group.broadcast(message, source)
            if group.rank != source and message.data_ptr() != pack[0].data_ptr():
                for tensor, value in _unpacked(message, pack):
                    write_into(tensor, value)


class SyncedBuffers:
    """The buffers that follow rank 0's, and the shapes of them that every rank knows.

    A buffer of rank 0's may get another shape, as one that is as long as the rank's rows (the last
    activations, a recurrent state). How many bytes travel must not depend on it: a broadcast of
    unequal lengths ends gloo's processes. So the first message has the length of the known shapes,
    and says whether rank 0's are others, which follow then.

    Args:
        places: the same on every rank, with tensors of the same shapes.
    """

    def __init__(self, places: Iterable[BufferPlace]) -> None:
        self._places = list(places)
        self._known = self._shapes()

    def broadcast(self, group: Group, *, cap_bytes: int) -> None:
        """Make buffers equal to those of rank 0: in place, or where a graph has saved one, anew.

        Args:
            group: the ranks.
            cap_bytes: the most that is packed into one message.

        Gradient:
            None: runs without recording, and graphs keep what they have saved.

        Collective:
            Every rank. Blocks. One broadcast per large buffer, and per device and `cap_bytes`; two
            for each that is sparse, quantized or nested. If rank 0 has other shapes, three more.

        Raises:
            NotAvailableError: rank 0 has other shapes, on an accelerator.
            PeerLostError: another rank went away.
        """
        if group.is_alone or not self._places:
            return
        with torch.no_grad():
            if self._send_blocks(group, cap_bytes, is_reshaped=self._is_reshaped(group)):
                self._known = _shapes_of_rank_0(group, self._shapes())
                self._send_blocks(group, cap_bytes, is_reshaped=False)
            for place, shape in zip(self._places, self._known, strict=True):
                if shape == _FILE:
                    _broadcast_file(group, place)
                elif shape is None and place.tensor() is not None:
                    place.owner._buffers[place.key] = None

    def _send_blocks(self, group: Group, cap_bytes: int, *, is_reshaped: bool) -> bool:
        """Whether rank 0 has other shapes than were sent; nothing has been written then."""
        places: dict[int, BufferPlace] = {}
        blocks: list[torch.Tensor] = []
        for place, shape in zip(self._places, self._known, strict=True):
            if isinstance(shape, tuple):
                held = place.tensor()
                block = held if _shape_of(held) == shape else _room_for(shape, held, group)
                assert block is not None
                blocks.append(block)
                places[id(block)] = place
        for number, pack in enumerate(list(_packs(blocks, cap_bytes)) or [[]]):
            device = pack[0].device if pack else group.device
            pieces = [as_bytes(block) for block in pack]
            if number == 0:
                said = torch.full((_HEAD,), is_reshaped, dtype=torch.uint8, device=device)
                pieces = [said, *pieces]
            message = torch.cat(pieces)  # a copy: a graph may need what lies there
            group.broadcast(message, 0)
            if number == 0:
                if message.device.type == "cpu" and message[0]:
                    return True
                message = message[_HEAD:]
            if group.rank != 0:
                for block, value in _unpacked(message, pack):
                    put(places[id(block)], value)
        return False

    def _shapes(self) -> list[_Shape]:
        return [_shape_of(place.tensor()) for place in self._places]

    def _is_reshaped(self, group: Group) -> bool:
        if group.rank != 0 or (shapes := self._shapes()) == self._known:
            return False
        pairs = zip(self._places, shapes, self._known, strict=True)
        names = [place.key for place, shape, known in pairs if shape != known]
        if group.device.type == "cpu":
            return True
        # Ranks would have to wait for the device in every step, to learn of it.
        raise NotAvailableError(
            "a buffer has another shape than when it was synchronised",
            where=f"rank 0 of {group.size}",
            got=", ".join(f"`{name}`" for name in names),
            cause="the forward replaces it by a tensor with a row for each row of the batch",
            fix="each rank has its own: lockstep.local(buffer) before replicate() or register()",
        )


_FILE: Final = "file"
_Shape = tuple[torch.dtype, torch.Size] | str | None
"""What decides how many bytes travel; `_FILE` for what travels with its length."""


def _shape_of(tensor: torch.Tensor | None) -> _Shape:
    if tensor is None:
        return None
    return (tensor.dtype, tensor.shape) if is_block(tensor) else _FILE


def _room_for(
    shape: tuple[torch.dtype, torch.Size], held: torch.Tensor | None, group: Group
) -> torch.Tensor:
    device = group.device if held is None else held.device
    return torch.empty(shape[1], dtype=shape[0], device=device)


def _shapes_of_rank_0(group: Group, mine: list[_Shape]) -> list[_Shape]:
    """Two broadcasts: of a length, and of the shapes."""
    text = json.dumps([_to_json(shape) for shape in mine]).encode()
    told = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return [_from_json(one) for one in json.loads(_from_rank_0(group, told).numpy().tobytes())]


def _to_json(shape: _Shape) -> Any:
    return [str(shape[0]).removeprefix("torch."), *shape[1]] if isinstance(shape, tuple) else shape


def _from_json(told: Any) -> _Shape:
    return (getattr(torch, told[0]), torch.Size(told[1:])) if isinstance(told, list) else told


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where numbers are not a number, and in tensors that are no block of memory."""
    kinds = [(x.layout, x.dtype, x.is_quantized, x.is_nested) for x in (one, other)]
    if kinds[0] != kinds[1] or (not one.is_nested and one.shape != other.shape):
        return False
    if one.is_quantized:
        return torch.equal(one, other)  # with what the integers stand for
    if is_block(one):
        return torch.equal(as_bytes(one), as_bytes(other))
    pairs = list(zip_longest(_blocks_of(one), _blocks_of(other)))
    return all(a is not None and b is not None and same_bits(a, b) for a, b in pairs)


def _blocks_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What a sparse or nested tensor is made of."""
    if tensor.is_nested:
        return tensor.detach().unbind()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def put(place: BufferPlace, value: torch.Tensor) -> None:
    """Let the buffer be `value`: in place, unless a graph has saved what is there."""
    tensor = place.tensor()
    if tensor is None or not fits(value, tensor):
        if tensor is None or not same_bits(tensor, value):
            place.owner._buffers[place.key] = value.clone()
        return
    is_saved = is_in_graph(tensor)
    # A view of it may be saved: what is equal already is not written.
    if (is_saved or has_aliases(tensor)) and same_bits(tensor, value):
        return
    if is_saved:
        fresh = torch.empty_like(tensor)  # laid out alike, as ranks agree when a group forms
        write_into(fresh, value)
        place.owner._buffers[place.key] = fresh
    else:
        write_into(tensor, value)


def _broadcast_file(group: Group, place: BufferPlace) -> None:
    tensor = place.tensor()
    file = io.BytesIO()
    torch.save(tensor, file)
    own = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(group.device, copy=True)
    message = _from_rank_0(group, own)
    if group.rank != 0 and not torch.equal(message, own):
        file = io.BytesIO(message.cpu().numpy().tobytes())
        device = group.device if tensor is None else tensor.device
        place.owner._buffers[place.key] = torch.load(file, map_location=device)


def _from_rank_0(group: Group, own: torch.Tensor) -> torch.Tensor:
    """The bytes of rank 0, of which there may be more than here: two broadcasts."""
    length = torch.tensor([len(own)], device=group.device)
    group.broadcast(length, 0)
    message = own.clone() if group.rank == 0 else own.new_empty(int(length))
    group.broadcast(message, 0)
    return message


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


def _unpacked(
    message: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        piece = message[offset : offset + size].view(tensor.dtype)
        yield tensor, piece.view(tensor.shape)
        offset += size
