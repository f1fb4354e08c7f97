# SPDX-License-Identifier: Apache-2.0
"""Many small tensors looked at as one: what they take each is a call of torch's, or several.

They are put side by side in one buffer, each at a multiple of eight bytes, so that its bits are
lanes of its own. Of 400 tensors all that is wanted costs a tenth of what it costs one by one. More
than fit into a small buffer take several, one after the other: a program that has filled its device
is not to run out of memory because it is watched.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SMALL: Final = 1 << 15
"""Elements; a larger tensor is not worth its copy."""
MOST_BYTES: Final = 1 << 20
"""Of one buffer, which a processor's cache holds; its sums need as much again."""
_FEW: Final = 4
_LANE: Final = 8


@dataclass(frozen=True)
class Packed:
    """Tensors of one dtype on one device, side by side.

    Attributes:
        places: which of all tensors they are.
        buffer: their elements, and zeros between them.
        starts: where each begins, in elements.
        sizes: how many it has.
    """

    places: list[int]
    buffer: torch.Tensor
    starts: list[int]
    sizes: list[int]

    def lane_sums(self) -> np.ndarray[Any, Any]:
        """For each, the sum of its bits as 64-bit numbers, which overflow; shape (P,)."""
        lanes = self.buffer.view(torch.int64)
        per_lane = _LANE // self.buffer.element_size()
        ends = [start // per_lane - 1 for start in self.starts[1:]] + [len(lanes) - 1]
        up_to_ends = lanes.cumsum(0)[torch.tensor(ends, device=lanes.device)]
        return np.diff(up_to_ends.cpu().numpy(), prepend=0)

    def elements(self, places: Sequence[int]) -> np.ndarray[Any, Any]:
        """Those at `places` of the buffer, as float64."""
        wanted = torch.tensor(places, device=self.buffer.device)
        result: np.ndarray[Any, Any] = self.buffer[wanted].double().cpu().numpy()
        return result


def packed(tensors: Sequence[torch.Tensor | None]) -> Iterator[Packed]:
    """The small ones among `tensors`, by dtype and device; a few alone are left out.

    Each buffer is made when it is asked for.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and 0 < tensor.numel() <= SMALL and tensor.is_floating_point():
            alike.setdefault((tensor.dtype, tensor.device), []).append(place)
    for places in alike.values():
        if len(places) >= _FEW:
            for part in _parts(tensors, places):
                yield _pack(tensors, part)


def _parts(tensors: Sequence[torch.Tensor | None], places: list[int]) -> Iterator[list[int]]:
    """Those of `places` that one buffer holds, in their order."""
    part: list[int] = []
    filled = 0
    for place in places:
        tensor = tensors[place]
        assert tensor is not None
        needed = -(-tensor.numel() * tensor.element_size() // _LANE) * _LANE
        if part and filled + needed > MOST_BYTES:
            yield part
            part, filled = [], 0
        part.append(place)
        filled += needed
    if part:
        yield part


def _pack(tensors: Sequence[torch.Tensor | None], places: list[int]) -> Packed:
    pieces: list[torch.Tensor] = []
    spans: list[int] = []
    sizes: list[int] = []
    zeros: torch.Tensor | None = None
    for place in places:
        tensor = tensors[place]
        assert tensor is not None
        size = tensor.numel()
        missing = -size % (_LANE // tensor.element_size())
        pieces.append(tensor.reshape(-1))
        if missing:
            zeros = tensor.new_zeros(_LANE) if zeros is None else zeros
            pieces.append(zeros[:missing])
        spans.append(size + missing)
        sizes.append(size)
    starts = [0, *accumulate(spans)][:-1]
    return Packed(places, torch.cat(pieces), starts, sizes)
