# SPDX-License-Identifier: Apache-2.0
"""What stands for a list of tensors when ranks are compared.

Three numbers for each tensor. A *hash* that adds up its bits as 64-bit lanes: equal bits have
equal hashes, whatever the layout, at half a percent of a training step. A *norm*, and a few
*sample* elements, which say how far apart two tensors are whose hashes differ.
"""

from __future__ import annotations

import math
import zlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.audit.packed import Packed, packed
from lockstep.audit.prints import ABSENT, Fingerprint, Sketch
from lockstep.audit.probe.shards import span_in_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_AT_ONCE = 1 << 18
"""Elements of a sparse tensor that are added up at once."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def take(
    tensors: Sequence[torch.Tensor | None], counts: Sequence[int], *, norms: bool = True
) -> Fingerprint:
    """The fingerprint of `tensors`, of which `counts` elements each are sampled.

    Without `norms`, which cost twice as much as the hashes, they are NaN. The samples of a sparse
    tensor are sums of its elements; those of a piece are NaN where another rank has the element.

    Gradient:
        None: it reads.

    Collective:
        None.
    """
    with torch.no_grad():
        plain = [None if t is None else dense(t) for t in tensors]
        hashes = np.full(len(plain), ABSENT, dtype=np.int64)
        lengths = np.full(len(plain), np.nan)
        samples = np.full(sum(counts), np.nan)
        spans = {place: span for place, t in enumerate(tensors) if (span := span_in_whole(t))}
        small: set[int] = set()
        for group in packed(plain):
            hashes[group.places] = group.lane_sums()
            _fill_packed_samples(samples, group, counts, spans)
            small.update(group.places)
        large = {p: t for p, t in enumerate(plain) if t is not None and p not in small}
        if large:
            hashes[list(large)] = stacked([_lane_sum(t) for t in large.values()]).numpy()
            _fill_samples(samples, large, counts, spans)
        for place, tensor in enumerate(tensors):
            if tensor is not None and _is_sparse(tensor) and counts[place]:
                end = sum(counts[: place + 1])
                samples[end - counts[place] : end] = _folded(tensor, counts[place])
        present = [t for t in plain if t is not None]
        if norms and present:
            lengths[[place for place, t in enumerate(plain) if t is not None]] = _norms(present)
    return Fingerprint(hashes, lengths, samples)


def sampled(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The elements that `take` samples of a tensor, as float64 on its device; shape (count,).

    Gradient:
        None: it reads.

    Collective:
        None.
    """
    with torch.no_grad():
        if _is_sparse(tensor):
            return torch.from_numpy(_folded(tensor, count))
        flat = dense(tensor).reshape(-1)
        taken = flat[:: max(1, flat.numel() // count)][:count]
        return taken.to(torch.float64, copy=True)


def sketch(
    tensors: dict[int, torch.Tensor], lengths: dict[int, torch.Tensor], counts: Sequence[int]
) -> Sketch:
    """What stands for some of P tensors, by their places.

    Args:
        tensors: what `sampled` gave.
        lengths: their squared norms.
        counts: how many are sampled of each of the P.
    """
    norms = np.full(len(counts), np.nan)
    if lengths:
        norms[list(lengths)] = np.sqrt(stacked(list(lengths.values())).numpy())
    samples = np.full(sum(counts), np.nan)
    ends = list(accumulate(counts))
    slots: list[int] = []
    for place, values in tensors.items():
        start = ends[place] - counts[place]
        slots.extend(range(start, start + values.numel()))
    if slots:
        samples[slots] = torch.cat([values.cpu() for values in tensors.values()]).numpy()
    return Sketch(norms, samples)


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """As a scalar of float64 on the tensor's device.

    Gradient:
        None: it reads.

    Collective:
        None.
    """
    with torch.no_grad():
        plain = dense(tensor)
        norm: torch.Tensor = torch.linalg.vector_norm(
            plain if _has_a_norm(plain) else plain.double()
        )
        return norm.to(torch.float64).square()


def numpy_state() -> int:
    """What stands for the state of the generator that numpy's functions draw from."""
    _, keys, place, has_spare, spare = np.random.get_state(legacy=True)
    drawn = f"{place} {has_spare} {spare}".encode()
    return zlib.crc32(drawn, zlib.crc32(np.asarray(keys).tobytes()))


def lengths_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The norm of each, as float64 and with one transfer for all.

    Gradient:
        None: it reads.

    Collective:
        None.
    """
    with torch.no_grad():
        real = [t.detach() if _has_a_norm(t) else t.detach().double() for t in tensors]
        norms = list(torch._foreach_norm(real, 2, dtype=torch.float64)) if real else []
        return list(map(float, stacked(norms).tolist())) if norms else []


def _has_a_norm(tensor: torch.Tensor) -> bool:
    """Floats of eight bits have none."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Its own numbers as an ordinary tensor: a shard's, a sparse tensor's values."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.is_floating_point():
        return tensor.detach() if tensor.device.type != "meta" else torch.zeros(0)
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # DTensor
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.to_dense()
    if tensor.is_meta:
        tensor = torch.zeros(0)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.is_sparse and not tensor.is_complex()


def _folded(tensor: torch.Tensor, count: int) -> np.ndarray[Any, Any]:
    """What a sparse tensor's elements add up to, by their place modulo `count`; shape (count,).

    Ranks have rows of their own, so that picked elements would be of none or of other rows; sums
    are still those of the ranks' where rows are added up.
    """
    held = tensor.detach().coalesce()
    values = held.values()
    values = values.reshape(len(values), math.prod(values.shape[1:]))
    rows = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    for indices, size in zip(held.indices(), held.shape, strict=False):
        rows = rows * size + indices
    width = values.shape[1]
    columns = torch.arange(width, device=values.device)
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    for start in range(0, len(values), _AT_ONCE // max(width, 1) + 1):
        some = slice(start, start + _AT_ONCE // max(width, 1) + 1)
        places = (rows[some, None] * width + columns) % count
        sums.index_add_(0, places.reshape(-1), values[some].double().reshape(-1))
    return sums.cpu().numpy()


def _lane_sum(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    flat = tensor.reshape(-1)
    if flat.dtype is torch.bool:
        flat = flat.view(torch.uint8)
    lanes = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    total = flat[:lanes].view(torch.int64).sum()
    if lanes < flat.numel():
        # A lane of its own, filled up with zeros, as where small tensors lie side by side.
        last = flat.new_zeros(8 // flat.element_size())
        last[: flat.numel() - lanes] = flat[lanes:]
        total = total + last.view(torch.int64).sum()
    return total


def _norms(tensors: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    floats = [t if _has_a_norm(t) else t.double() for t in tensors]
    norms = list(torch._foreach_norm(floats))
    if all(n.dtype is norms[0].dtype for n in norms):
        return stacked(norms).double().numpy()
    return stacked([n.double() for n in norms]).numpy()


def stacked(scalars: list[torch.Tensor]) -> torch.Tensor:
    """As one tensor of the CPU's, with one transfer where they are on one device."""
    first = scalars[0].device
    if all(s.device == first for s in scalars):
        return torch.stack(scalars).cpu()
    return torch.stack([s.cpu() for s in scalars])


def _places(size: int, count: int, span: tuple[int, int] | None) -> tuple[range, int]:
    """Which elements of a tensor are sampled; as the how manieth sample of the whole they count."""
    if span is None:
        return range(0, size, max(1, size // count))[:count], 0
    start, whole = span
    stride = max(1, whole // count)
    first = -(-start // stride)
    last = min(count, -(-(start + size) // stride))
    return range(first * stride - start, last * stride - start, stride), first


def _sampled_places(
    tensors: Iterable[tuple[int, int]], counts: Sequence[int], spans: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, range, range]]:
    """By tensor: its place, which of its elements are sampled, and the slots of their samples.

    Args:
        tensors: their places and sizes.
    """
    ends = list(accumulate(counts))
    for place, size in tensors:
        count = counts[place]
        if count and size:
            places, first = _places(size, count, spans.get(place))
            start = ends[place] - count + first
            yield place, places, range(start, start + len(places))


def _fill_samples(
    samples: np.ndarray[Any, Any],
    tensors: dict[int, torch.Tensor],
    counts: Sequence[int],
    spans: dict[int, tuple[int, int]],
) -> None:
    picked: list[torch.Tensor] = []
    slots: list[int] = []
    sizes = ((place, tensor.numel()) for place, tensor in tensors.items())
    for place, places, its_slots in _sampled_places(sizes, counts, spans):
        picked.append(tensors[place].reshape(-1)[places.start : max(places.stop, 0) : places.step])
        slots.extend(its_slots)
    if picked:
        samples[slots] = torch.cat([p.double().cpu() for p in picked]).numpy()


def _fill_packed_samples(
    samples: np.ndarray[Any, Any],
    group: Packed,
    counts: Sequence[int],
    spans: dict[int, tuple[int, int]],
) -> None:
    wanted: list[int] = []
    slots: list[int] = []
    starts = dict(zip(group.places, group.starts, strict=True))
    sizes = zip(group.places, group.sizes, strict=True)
    for place, places, its_slots in _sampled_places(sizes, counts, spans):
        wanted.extend(starts[place] + at for at in places)
        slots.extend(its_slots)
    if wanted:
        samples[slots] = group.elements(wanted)
