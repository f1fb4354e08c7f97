# SPDX-License-Identifier: Apache-2.0
"""`WeightHashes`: hashes of a run's weights, a part of them at each step.

A hash of all weights at each step would cost as much as a small optimizer's step. The weights are
cut into `NUM_PARTS` parts of equal size instead; each step hashes one, so that the cost is a
sixty-fourth, and a bit that differs is seen after 64 steps at the latest. A difference in one
weight is mostly in all of them a step later, through the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from lockstep.tensor_copies import as_bytes, is_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NUM_PARTS: Final = 64

_LANE: Final = 8
"""Bytes that are added up as one number."""

_MODULUS: Final = 1 << 64

_CACHED: Final = 1 << 14
_ON_DEVICE: Final = 1 << 22
"""Lanes that are mixed at once."""


@dataclass(frozen=True)
class PartHash:
    """The hash of one part of the weights.

    Attributes:
        part: its number, below `NUM_PARTS`.
        bits: a hash of its bits, below 2**64: equal bits have equal hashes. Two lanes of one tensor
            that trade places have the same hash; a flipped bit has another one.
        norm: the Euclidean norm of its numbers, which says how far apart two parts are.
    """

    part: int
    bits: int
    norm: float


class TensorSlot(NamedTuple):
    """Where a module keeps a tensor, which a program may replace by another one.

    Attributes:
        name: of the tensor, for messages.
        owner: its module's parameters or buffers.
        key: its name there.
    """

    name: str
    owner: Mapping[str, torch.Tensor | None]
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.owner.get(self.key)


class _Piece(NamedTuple):
    slot: TensorSlot
    start: int
    stop: int


class UnreadHash(NamedTuple):
    """A part's hash on its device: nobody has waited for that yet.

    Attributes:
        part: its number.
        lanes: for each piece the sum of its lanes.
        norms: for each piece of floating-point numbers its norm.
    """

    part: int
    lanes: Sequence[torch.Tensor]
    norms: Sequence[torch.Tensor]


class WeightHashes:
    """Hashes of weights and buffers.

    Args:
        find_slots: finds the places of the tensors, each tensor once, in the same order on every
            call and in every process.
    """

    def __init__(self, find_slots: Callable[[], Sequence[TensorSlot]]) -> None:
        self._find_slots = find_slots
        self._pieces: list[list[_Piece]] = []
        self._sizes: list[tuple[TensorSlot, int]] = []

    def take(self, parts: Iterable[int]) -> list[UnreadHash]:
        """Hash some parts as they are now; no host waits for a device.

        Gradient:
            None: it reads.

        Collective:
            None.
        """
        self._cut()
        return [_hash(part, self._pieces[part]) for part in parts if self._pieces[part]]

    def names_in(self, part: int) -> list[str]:
        """The names of the tensors of which something lies in a part."""
        self._cut()
        return [piece.slot.name for piece in self._pieces[part]]

    def _cut(self) -> None:
        if self._pieces and all(_num_bytes(slot.tensor) == size for slot, size in self._sizes):
            return
        slots = self._find_slots()
        self._sizes = [(slot, _num_bytes(slot.tensor)) for slot in slots]
        total = sum(_whole_lanes(size) for _, size in self._sizes)
        per_part = max(_whole_lanes(-(-total // NUM_PARTS)), _LANE)
        self._pieces = [[] for _ in range(NUM_PARTS)]
        position = 0
        for slot, size in self._sizes:
            start = 0
            while start < size:
                part, used = divmod(position, per_part)
                stop = min(size, start + per_part - used)
                self._pieces[part].append(_Piece(slot, start, stop))
                position += _whole_lanes(stop - start)
                start = stop


def read_hashes(unread: Sequence[UnreadHash]) -> tuple[PartHash, ...]:
    """Read hashes from their device."""
    return tuple(
        PartHash(part, _folded(_numbers(lanes)), math.hypot(*_numbers(norms)))
        for part, lanes, norms in unread
    )


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    if not scalars:
        return []
    numbers: list[float] = torch.stack([each.cpu() for each in scalars]).tolist()
    return numbers


def _folded(lanes: Sequence[float]) -> int:
    bits = 0
    for lane in lanes:
        bits = (bits * 31 + int(lane)) % _MODULUS
    return bits


def _num_bytes(tensor: torch.Tensor | None) -> int:
    if tensor is None or not is_block(tensor) or tensor.is_meta:
        return 0
    return tensor.numel() * tensor.element_size()


def _whole_lanes(num_bytes: int) -> int:
    return -(-num_bytes // _LANE) * _LANE


def _hash(part: int, pieces: Sequence[_Piece]) -> UnreadHash:
    lanes: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    with torch.no_grad():
        for slot, start, stop in pieces:
            tensor = slot.tensor
            assert tensor is not None, "`_cut` compares sizes"
            piece = as_bytes(tensor)[start:stop]
            lanes.append(_sum_of_lanes(piece))
            if tensor.dtype.is_floating_point and tensor.element_size() > 1:
                numbers = piece.view(tensor.dtype)
                norms.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    return UnreadHash(part, lanes, norms)


def _sum_of_lanes(piece: torch.Tensor) -> torch.Tensor:
    """The sum of the bytes as 64-bit numbers; what is left over is filled up with zeros.

    Unlike `sync.tensor_bits.sum_of_bits` no host waits for it, and it uses all 64 bits, which
    the exchanges that compare ranks cannot carry.
    """
    whole, rest = _lanes_of(piece)
    return whole.sum() + rest.sum()


def sum_of_mixed_lanes(piece: torch.Tensor) -> torch.Tensor:
    """As the hash of a part, and lanes that trade places, or differ in pairs, change it too.

    For what is hashed rarely: it takes several passes over the bytes. Each lane is mixed with its
    place as in splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    whole, rest = _lanes_of(piece)
    # On a CPU in pieces that stay in its caches: each pass over memory would cost what adding does.
    size = _CACHED if piece.device.type == "cpu" else _ON_DEVICE
    parts = [*whole.split(size), rest]
    places = torch.arange(1, size + 1, device=piece.device) * _signed(0x9E3779B97F4A7C15)
    total = rest.new_zeros(())
    begin = 0
    for part in parts:
        mixed = part + places[: len(part)]
        mixed += begin * _signed(0x9E3779B97F4A7C15) % _MODULUS - _MODULUS // 2
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            # torch fills up with the sign, and two numbers would become one: mask that.
            mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
            mixed *= _signed(factor)
        total += mixed.sum()
        begin += len(part)
    return total


def _signed(number: int) -> int:
    return number - _MODULUS if number >= _MODULUS // 2 else number


def _lanes_of(piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes as 64-bit numbers, and the last of them, filled up with zeros; empty for none."""
    if piece.storage_offset() % _LANE:
        piece = piece.clone()
    whole = len(piece) // _LANE * _LANE
    rest = piece.new_zeros(_LANE if whole < len(piece) else 0)
    rest[: len(piece) - whole] = piece[whole:]
    return piece[:whole].view(torch.int64), rest.view(torch.int64)
