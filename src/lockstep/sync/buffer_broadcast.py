# SPDX-License-Identifier: Apache-2.0
"""`BufferBroadcast`: makes module buffers equal to rank 0's after each backward.

Two things make this harder than a broadcast of tensors. A forward may replace a buffer by one of
another shape, so that ranks would bring messages of unequal length. And a graph whose backward is
still to come (two forwards, then two backwards) may have saved a buffer: writing to it would make
that backward fail. A buffer that is equal already stays as it is; another one is exchanged for a
new tensor, and the graph keeps the old one. Buffers that are not strided (sparse, quantized,
nested) travel as ``torch.save`` writes them.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from lockstep._torch_compat import buffers_of
from lockstep.errors import NotAvailableError
from lockstep.sync.local_parameters import buffer_of, is_local_buffer
from lockstep.sync.tensor_bits import same_bits
from lockstep.sync.tensor_broadcast import make_block, split_into_messages, unpack_block
from lockstep.sync.tensor_reference_counts import has_aliases, is_in_graph
from lockstep.tensor_copies import fits, is_block, write_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.group import Group

_FILE: Final = "file"
_Shape = tuple[torch.dtype, torch.Size] | str | None
"""A buffer's dtype and shape, hence its bytes in a message; `_FILE`: it travels as a file."""


@dataclass
class BufferPlace:
    """A module and the name of one of its buffers; the module may replace the tensor."""

    owner: torch.nn.Module
    key: str

    def tensor(self) -> torch.Tensor | None:
        return buffer_of(self.owner, self.key)

    def put(self, value: torch.Tensor | None) -> None:
        """Let the buffer be `value`: in place, unless a graph has saved the tensor there."""
        tensor = self.tensor()
        if value is None:
            buffers_of(self.owner)[self.key] = None
            return
        if tensor is None or not fits(value, tensor):
            if tensor is None or not same_bits(tensor, value):
                buffers_of(self.owner)[self.key] = value.clone()
            return
        is_saved = is_in_graph(tensor)
        # A graph may have saved a view of it: a buffer that is equal already is not written.
        if (is_saved or has_aliases(tensor)) and same_bits(tensor, value):
            return
        if is_saved:
            fresh = torch.empty_like(tensor)  # laid out alike, as ranks agree when a group forms
            write_into(fresh, value)
            buffers_of(self.owner)[self.key] = fresh
        else:
            write_into(tensor, value)


def may_be_filled(owner: torch.nn.Module) -> bool:
    """Whether a buffer of `owner` that is None can become a tensor; in torch's own layers none."""
    return not type(owner).__module__.startswith("torch.nn.")


def buffer_places(modules: Iterable[torch.nn.Module]) -> list[BufferPlace]:
    """The places of the buffers of `modules`; a buffer that several modules share has one.

    Also those that are None and may be filled by a forward.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    found: dict[int, BufferPlace] = {}
    for part in parts:
        for key, tensor in buffers_of(part).items():
            place = BufferPlace(part, key)
            if tensor is not None:
                found.setdefault(id(tensor), place)
            elif may_be_filled(part):
                found[id(place)] = place
    return list(found.values())


Copies: TypeAlias = "list[tuple[BufferPlace, torch.Tensor | None]]"


def copy_buffers(places: Iterable[BufferPlace]) -> Copies:
    """The values that the buffers have now, for `put_buffers`."""
    held = ((place, place.tensor()) for place in places)
    return [(place, None if value is None else value.detach().clone()) for place, value in held]


@torch.no_grad()
def put_buffers(copies: Copies) -> None:
    """Give buffers the values that they had."""
    for place, value in copies:
        place.put(value)


def agree_on_shapes(group: Group, modules: Sequence[torch.nn.Module]) -> None:
    """Let buffers whose shapes differ between the ranks of a new group be those of rank 0.

    A forward may have given a buffer a shape that other ranks have not seen, as tables of positions
    grow with the longest text. In a validation no broadcast follows.

    Gradient:
        None.

    Collective:
        Every rank. One small all-gather, and two broadcasts for each buffer that differs.
    """
    places = {
        f"{number}.{path}.{key}": BufferPlace(owner, key)
        for number, module in enumerate(modules)
        for path, owner in module.named_modules()
        for key in buffers_of(owner)
        if not is_local_buffer(owner, key)
    }
    shapes = {name: repr(_shape_of(place.tensor())) for name, place in places.items()}
    everyone = group.exchange(shapes)
    # Modules that share a buffer go on sharing it.
    replaced: dict[torch.Tensor, torch.Tensor | None] = {}
    for name, shape in everyone[0].items():
        known = [other[name] for other in everyone if name in other]
        if len(known) == len(everyone) and any(other != shape for other in known):
            place = places[name]
            before = place.tensor()
            _broadcast_file(group, place, group.device)
            if before is not None and place.tensor() is not before:
                buffers_of(place.owner)[place.key] = replaced.setdefault(before, place.tensor())


class BufferBroadcast:
    """The buffers to broadcast from rank 0, and the shapes of them that every rank knows.

    A buffer of rank 0's may get another shape, as one that is as long as the rank's rows (the last
    activations, a recurrent state). How many bytes travel must not depend on it: a broadcast of
    unequal lengths ends gloo's processes. So the first message has the length of the known shapes,
    and begins with a flag that says whether rank 0 has others; those shapes follow then.

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
                shapes = pickle.dumps(self._shapes())
                self._known = pickle.loads(_broadcast_bytes(group, shapes))
                self._send_blocks(group, cap_bytes, is_reshaped=False)
            for place, shape in zip(self._places, self._known, strict=True):
                if shape == _FILE:
                    _broadcast_file(group, place, self._device)
                elif shape is None and place.tensor() is not None:
                    place.put(None)

    def _send_blocks(self, group: Group, cap_bytes: int, *, is_reshaped: bool) -> bool:
        """Broadcast the buffers; True, and nothing is written, if rank 0 has other shapes."""
        places: dict[int, BufferPlace] = {}
        blocks: list[torch.Tensor] = []
        for place, shape in zip(self._places, self._known, strict=True):
            if isinstance(shape, tuple):
                held = place.tensor()
                if held is None or _shape_of(held) != shape:
                    dtype, size = shape
                    device = self._device if held is None else held.device
                    held = torch.empty(size, dtype=dtype, device=device)
                blocks.append(held)
                places[id(held)] = place
        parts = list(split_into_messages(blocks, cap_bytes)) or [[]]
        first = parts[0][0].device if parts[0] else self._device
        flag = torch.full((1,), is_reshaped, dtype=torch.uint8, device=first)
        parts[0].insert(0, flag)
        for part in parts:
            # A copy, even of a buffer that travels alone: a graph may have saved it.
            message = make_block(part, group.rank == 0)
            group.broadcast(message, 0)
            if group.rank == 0:
                if first.type == "cpu" and is_reshaped:
                    return True
                continue
            for block, value in zip(part, unpack_block(message, part), strict=True):
                if block is not flag:
                    places[id(block)].put(value)
                elif first.type == "cpu" and value:
                    return True
        return False

    @property
    def _device(self) -> torch.device:
        """That of the first buffer; a rank may have lost the others."""
        held = (place.tensor() for place in self._places)
        return next((each.device for each in held if each is not None), torch.device("cpu"))

    def _shapes(self) -> list[_Shape]:
        return [_shape_of(place.tensor()) for place in self._places]

    def _is_reshaped(self, group: Group) -> bool:
        if group.rank != 0 or (shapes := self._shapes()) == self._known:
            return False
        pairs = zip(self._places, shapes, self._known, strict=True)
        names = [place.key for place, shape, known in pairs if shape != known]
        if self._device.type == "cpu":
            return True
        # To learn of another shape, the ranks would have to wait for the device in every step.
        raise NotAvailableError(
            "a buffer has another shape than when it was synchronised",
            where=f"rank 0 of {group.size}",
            got=", ".join(f"`{name}`" for name in names),
            cause="the forward replaces it by a tensor with a row for each row of the batch",
            fix="each rank has its own: lockstep.local(buffer) before replicate() or register()",
        )


def _shape_of(tensor: torch.Tensor | None) -> _Shape:
    if tensor is None:
        return None
    return (tensor.dtype, tensor.shape) if is_block(tensor) else _FILE


def _broadcast_file(group: Group, place: BufferPlace, device: torch.device) -> None:
    tensor = place.tensor()
    file = io.BytesIO()
    torch.save(tensor, file)
    mine = file.getvalue()
    theirs = _broadcast_bytes(group, mine)
    if theirs != mine:
        device = device if tensor is None else tensor.device
        buffers_of(place.owner)[place.key] = torch.load(io.BytesIO(theirs), map_location=device)


def _broadcast_bytes(group: Group, mine: bytes) -> bytes:
    """Rank 0's bytes, of which there may be more than this rank's: two broadcasts."""
    length = torch.tensor([len(mine)], device=group.device)
    group.broadcast(length, 0)
    message = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(group.device)
    if group.rank != 0:
        message = message.new_empty(int(length))
    group.broadcast(message, 0)
    return message.cpu().numpy().tobytes()
