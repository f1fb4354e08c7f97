# SPDX-License-Identifier: Apache-2.0
"""Messages as large as a model that an optimizer holds: weights of its own that a rank tells.

Elastic averaging, consensus methods, codistillation and swapped models keep a model on each rank
that is like no other's, and tell one another about them every few steps, or mix them in each.
``isend`` is watched in the process group: torch compares the function itself by identity.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep.audit.facts import ModelSent
from lockstep.audit.fingerprint import lengths_of, stacked
from lockstep.audit.ledger import MODELS_SENT, REDUCING

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe, Watched

SENDING: Final = "send"
TELLING: Final = (*REDUCING, "all_gather", "all_gather_into_tensor")
_MOST: Final = 4
"""Times the model: with two moments for each weight, say."""
_SAME: Final = 1e-5


def install(probe: Probe) -> None:
    """Watch what one rank sends to another."""
    group = dist.ProcessGroup
    probe.patches.wrap(group, SENDING, functools.partial(_send, probe))


def _send(
    probe: Probe, original: Callable[..., Any], group: Any, tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    probe.ledger.facts.sends = True
    if probe.is_on and not probe.in_backward and not probe.is_elsewhere():
        for tensor in tensors:
            probe.harmlessly(note, probe, SENDING, tensor)
    return original(group, tensors, *args, **kwargs)


def note(probe: Probe, op: str, tensor: torch.Tensor) -> None:
    """Keep it, if it is as large as what an optimizer of modules holds, or completes that.

    Of other messages only the size is looked at: it is called for each, in every step.
    """
    noted = probe.ledger.facts.models_sent
    size = tensor.numel()
    if len(noted) >= MODELS_SENT or not size or not tensor.is_floating_point():
        return
    for watched in probe.optimizers.values():
        held = watched.held
        if 1 < held <= size <= _MOST * held and size % held == 0:
            weights = _are_weights(watched, tensor)
            weights = weights or (op not in REDUCING and _are_scaled_weights(watched, tensor))
        elif op == SENDING and probe.detailed and _is_the_last_part(watched, tensor):
            weights = True
        else:
            continue
        sent = ModelSent(held, op, weights, probe.detailed, _steps_behind(probe, watched))
        if sent not in noted[-1:]:  # to many peers, one after the other
            noted.append(sent)
        return


def _steps_behind(probe: Probe, watched: Watched) -> int:
    """Of those that are written down, by optimizers that are made where this one is."""
    where = watched.track.where
    return sum(len(track.steps) for track in probe.ledger.tracks if track.where == where)


def _are_weights(watched: Watched, tensor: torch.Tensor) -> bool:
    """Is it what the optimizer holds, unchanged? Their mean would be the model of all ranks."""
    if any(hasattr(p, "to_local") for p in watched.parameters):
        return False  # pieces: the norm of the whole would take a collective
    *norms, told = lengths_of([*watched.parameters, tensor])
    weights = math.hypot(*norms)
    return abs(told - weights) <= _SAME * weights


def _are_scaled_weights(watched: Watched, tensor: torch.Tensor) -> bool:
    """Do they point where the optimizer's point, as a share of them that a peer is to add?"""
    sizes = [p.numel() for p in watched.parameters]
    if tensor.numel() != sum(sizes) or any(hasattr(p, "to_local") for p in watched.parameters):
        return False
    products: list[torch.Tensor] = []
    with torch.no_grad():
        pieces = tensor.detach().reshape(-1).split(sizes)
        for param, piece in zip(watched.parameters, pieces, strict=True):
            held = param.detach().reshape(-1).double()
            sent = piece.to(held.device).double()
            products += [held @ sent, held @ held, sent @ sent]
        numbers = stacked(products).reshape(-1, 3)
    both, ours, theirs = map(float, numbers.sum(0).tolist())
    return both > 0.0 and both >= (1.0 - _SAME) * math.sqrt(ours * theirs)


def _is_the_last_part(watched: Watched, tensor: torch.Tensor) -> bool:
    """Has, with this parameter, each been sent by itself?"""
    places = range(len(watched.parameters))
    place = next((n for n in places if _is_parameter(watched.parameters[n], tensor)), None)
    if place is None:
        return False
    watched.parts_sent.add(place)
    complete = len(watched.parts_sent) == len(watched.parameters)
    if complete:
        watched.parts_sent.clear()
    return complete


def _is_parameter(param: torch.Tensor, tensor: torch.Tensor) -> bool:
    if hasattr(param, "to_local"):
        return False
    if param.shape != tensor.shape or param.device != tensor.device:
        return False
    with torch.no_grad():
        return bool(torch.equal(param.detach(), tensor.to(param.dtype)))
