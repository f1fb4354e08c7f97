# SPDX-License-Identifier: Apache-2.0
"""Modules that nobody trains and that training calls: teachers, targets, feature extractors.

No wrapper or optimizer knows them, so nothing makes them the same on all ranks.
"""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.fingerprint import take
from lockstep.audit.prints import samples_per_tensor
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.shards import is_fully_sharded, is_piece
from lockstep.sync.ownership import is_local

if TYPE_CHECKING:
    import torch

    from lockstep.audit.probe.probe import Probe

_A_STEP: Final = 8


def note_call(probe: Probe, module: torch.nn.Module) -> None:
    """Remember `module` until the step, if nothing in it is trained."""
    known = probe.is_frozen.get(id(module))
    if known is None or known[0]() is not module:
        known = _look_at(probe, module)
    if not known[1]:
        return
    for window in probe.each_window():
        if len(window.frozen) < _A_STEP and all(m() is not module for m, _ in window.frozen):
            window.frozen.append((known[0], users_lines()))


def _look_at(probe: Probe, module: torch.nn.Module) -> tuple[weakref.ref[Any], bool]:
    """Whether it is frozen. Its parts are then taken care of: only the whole is remembered."""
    parameters = list(module.parameters())
    frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
    if frozen:
        for part in module.modules():
            probe.is_frozen[id(part)] = (weakref.ref(part), False)
    probe.is_frozen[id(module)] = (weakref.ref(module), frozen)
    return probe.is_frozen[id(module)]


def prints_of(
    probe: Probe, called: list[tuple[weakref.ref[torch.nn.Module], list[Any]]]
) -> list[dict[str, Any]]:
    """What the frozen modules that were called in a step hold now."""
    if not called:
        return []
    held = probe.parameters_held()
    found = []
    for reference, where in called:
        module = reference()
        if module is None or any(map(is_fully_sharded, module.modules())):
            continue
        kept = {
            name: p
            for name, p in module.named_parameters()
            if not (p.requires_grad or id(p) in held or is_piece(p) or is_local(p))
        }
        if not kept:
            continue
        shapes = [tuple(p.shape) for p in kept.values()]
        counts = samples_per_tensor([p.numel() for p in kept.values()])
        found.append(
            {
                "module": type(module).__name__,
                "key": zlib.crc32(repr((type(module).__name__, list(kept), shapes)).encode()),
                "names": list(kept),
                "counts": counts,
                "prints": take(list(kept.values()), counts),
                "where": where,
            }
        )
    return found
