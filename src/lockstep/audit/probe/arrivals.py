# SPDX-License-Identifier: Apache-2.0
"""Rows of other ranks that have arrived, and whether a loss is built from them.

They are known by their memory, and by the directions of some of them: rows that were chosen, put
in another order, scaled or brought to length 1 lie elsewhere and point where they pointed. Nothing
is kept alive: a program gathers more than it trains on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.audit.probe.graphs import each_saved, mark_of
from lockstep.audit.probe.records import Arrival

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from lockstep.audit.facts import Gathered
    from lockstep.audit.probe.graphs import Graph
    from lockstep.audit.probe.probe import Probe

_MOST: Final = 64
"""Arrivals between two steps, the last ones."""

_NODES: Final = 8
_ROWS: Final = 64
_COLUMNS: Final = 64
_SENT: Final = 4096
_COMPARED: Final = 1024
"""Rows of one tensor that an operation has kept."""

_LEAST: Final = 3
"""Numbers of a row that are not 0: fewer are the same in many rows."""

_SAME: Final = {torch.float32: 1e-9, torch.float64: 1e-12}
"""How far the cosine of two directions may be from 1."""

_JOINING: Final = ("cat", "concat", "stack", "vstack")


def keep(
    probe: Probe,
    origin: Gathered,
    sent: torch.Tensor,
    outputs: Iterable[torch.Tensor],
    *,
    detached: bool = False,
    is_there: bool = True,
) -> None:
    """Remember what arrived in `outputs`; with ``is_there=False`` it is under way still."""
    arrival = Arrival(origin, detached, sent_from=_memory(_plain(sent)))
    held = [_plain(output) for output in outputs]
    for output in held:
        _add_memory(arrival, output)
    if is_there and sent.dim() > 1:
        arrival.width = sent.shape[-1]
        with torch._C.DisableTorchFunction():
            _note_directions(arrival, _plain(sent), held)
    probe.arrivals.append(arrival)
    del probe.arrivals[:-_MOST]


def _note_directions(arrival: Arrival, sent: torch.Tensor, held: list[torch.Tensor]) -> None:
    own, arrived = (_directions(each, arrival.width) for each in ([sent], held))
    if own is None or arrived is None or sent.dtype not in _SAME:
        return
    all_sent = _units(sent.detach().reshape(-1, arrival.width)[:_SENT, :_COLUMNS])
    # What two ranks both have, as a popular item's row, does not tell whose it is.
    shared = ((arrived @ all_sent.T) > 1 - _SAME[sent.dtype]).any(dim=1)
    arrival.own, arrival.others = own, arrived[~shared]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Below one that waits for a functional collective, the one whose memory is written to."""
    elem = getattr(tensor, "elem", None)
    return elem if isinstance(elem, torch.Tensor) else tensor


def _add_memory(arrival: Arrival, tensor: torch.Tensor) -> None:
    if len(arrival.tensors) >= _MOST:
        return
    arrival.tensors.append(weakref.ref(tensor))
    memory = _memory(tensor)
    if memory is not None:
        arrival.memory.append(memory)


def _memory(tensor: torch.Tensor) -> tuple[StorageWeakRef, int] | None:
    """Where it lies; and for as long as it does, or the address may be another's."""
    pointer = _pointer(tensor)
    return None if pointer is None else (StorageWeakRef(tensor.untyped_storage()), pointer)


def _pointer(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # it stands for pieces elsewhere
        return None


def _directions(tensors: list[torch.Tensor], width: int) -> torch.Tensor | None:
    """Some rows of each, of length 1; None where there are none that can be told apart."""
    each = max(4, _ROWS // max(1, len(tensors)))
    rows = []
    for tensor in tensors[:_ROWS]:
        if _has_numbers(tensor) and tensor.dim() > 1 and tensor.shape[-1] == width:
            flat = tensor.detach().reshape(-1, width)
            rows.append(_units(flat[:: max(1, len(flat) // each)][:each, :_COLUMNS]))
    return torch.cat(rows) if rows else None


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Numbers of its own, to compute with: of one in pieces that would be to communicate."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
    return plain and tensor.dtype in _SAME and not hasattr(tensor, "to_local")


def _units(rows: torch.Tensor) -> torch.Tensor:
    few = rows.double()
    lengths = few.norm(dim=1, keepdim=True)
    tells = ((few != 0).sum(dim=1, keepdim=True) >= _LEAST) & (lengths > 0) & lengths.isfinite()
    return torch.where(tells, few / lengths, torch.zeros_like(few))


def join(probe: Probe) -> None:
    """Follow arrivals through the functions that put rows together, until backward."""
    if probe.following.is_empty:
        for name in _JOINING:
            probe.following.wrap_operator(name, probe.afterwards(_note_joined))


def _note_joined(probe: Probe, result: Any, args: Any, kwargs: Any) -> None:
    given = args[0] if args else kwargs.get("tensors")
    if isinstance(result, torch.Tensor) and isinstance(given, list | tuple):
        with torch._C.DisableTorchFunction():
            _follow(probe, result, [part for part in given if isinstance(part, torch.Tensor)])


def _follow(probe: Probe, result: torch.Tensor, parts: list[torch.Tensor]) -> None:
    with_gradient = {_pointer(_plain(part)) for part in parts if part.requires_grad}
    known = _known(probe, with_gradient)
    for part in parts:
        arrival = known.get(_pointer(_plain(part)))
        if arrival is not None:
            _add_memory(arrival, _plain(result))
            if result.grad_fn is not None:
                arrival.joined = [*arrival.joined, mark_of(result.grad_fn)][-_NODES:]
            return


def _known(probe: Probe, beside: Collection[int | None] = ()) -> dict[int | None, Arrival]:
    """By their memory; those whose rows were sent without their gradient only `beside` them."""
    return {
        pointer: arrival
        for arrival in probe.arrivals
        if not arrival.detached or _lies_in(arrival, beside)
        for storage, pointer in arrival.memory
        if not storage.expired()
    }


def _lies_in(arrival: Arrival, places: Collection[int | None]) -> bool:
    """Are the rows that were sent still at one of these places?"""
    sent = arrival.sent_from
    return sent is not None and not sent[0].expired() and sent[1] in places


def found_in(probe: Probe, graph: Graph) -> list[Gathered]:
    """The origins of those arrivals that a graph is built from."""
    # Put together with rows that have a gradient, they are part of the graph themselves.
    told = {
        id(arrival)
        for arrival in probe.arrivals
        if any(graph.find(mark) is not None for mark in arrival.joined)
        or any(tensor.grad_fn in graph.nodes for tensor in arrival.living())
    }
    waiting = [a for a in probe.arrivals if id(a) not in told and not a.is_sent_back()]
    if waiting:
        known = {p: a for p, a in _known(probe).items() if id(a) not in told}
        for node in graph.nodes:
            for tensor in each_saved(node):
                with torch._C.DisableTorchFunction():
                    told.update(map(id, _recognised(tensor, waiting, known)))
    return [arrival.origin for arrival in probe.arrivals if id(arrival) in told]


def _recognised(
    tensor: torch.Tensor, waiting: list[Arrival], known: dict[int | None, Arrival]
) -> list[Arrival]:
    plain = _plain(tensor)
    at = known.get(_pointer(plain))
    by_memory = [at] if at is not None and not at.is_sent_back() else []
    base = plain if plain._base is None else plain._base
    if plain.dim() != 2 or not _has_numbers(plain) or (base.is_leaf and base.requires_grad):
        return by_memory  # a table holds the rows that were looked up in it
    return by_memory + [a for a in waiting if _holds(plain, a)]


def _holds(tensor: torch.Tensor, arrival: Arrival) -> bool:
    """Are there rows of other ranks in it, and with a gradient beside rows of this one's?"""
    others, own = arrival.others, arrival.own
    if others is None or own is None or arrival.width not in tensor.shape:
        return False
    if (arrival.detached and not tensor.requires_grad) or tensor.device != own.device:
        return False
    same = 1 - _SAME[tensor.dtype]
    rows = tensor.detach() if tensor.shape[1] == arrival.width else tensor.detach().T
    units = _units(rows[:_COMPARED, :_COLUMNS])
    if not bool(((units @ others.T) > same).any()):
        return False
    return not tensor.requires_grad or bool(((units @ own.T) > same).any())
