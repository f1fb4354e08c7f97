# SPDX-License-Identifier: Apache-2.0
"""Modules that training calls: those that nobody trains, and the mode of the trained ones.

No wrapper or optimizer knows a teacher, a target or a feature extractor, so nothing makes them the
same on all ranks.
"""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any, Final

from torch.nn.parallel import DistributedDataParallel

from lockstep.audit.facts import FrozenModule, Mode
from lockstep.audit.fingerprint import take
from lockstep.audit.prints import samples_per_tensor
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.names import held_by
from lockstep.audit.probe.records import Known
from lockstep.audit.probe.shards import is_fully_sharded, is_piece
from lockstep.sync.local_parameters import is_local

if TYPE_CHECKING:
    import torch

    from lockstep.audit.probe.probe import Probe

_A_STEP: Final = 8


def note_call(probe: Probe, module: torch.nn.Module) -> None:
    """Remember `module` until the step, if nothing in it is trained."""
    known = probe.is_frozen.get(id(module))
    if known is None or known.module() is not module or known.has_changed():
        known = _look_at(probe, module)
    if not known.frozen:
        return
    for window in probe.each_window():
        if len(window.frozen) < _A_STEP and all(m() is not module for m, _ in window.frozen):
            window.frozen.append((known.module, users_lines()))


def _look_at(probe: Probe, module: torch.nn.Module) -> Known:
    """Whether it is frozen. Its parts are then taken care of: only the whole is remembered."""
    parameters = list(module.parameters())
    trained = next((weakref.ref(p) for p in parameters if p.requires_grad), None)
    frozen = bool(parameters) and trained is None
    before = probe.is_frozen.get(id(module))
    if trained is None and before is not None and before.module() is module:
        trained = before.trained
    if frozen:
        for part in module.modules():
            probe.is_frozen[id(part)] = Known(weakref.ref(part), False)
    known = probe.is_frozen[id(module)] = Known(weakref.ref(module), frozen, trained)
    return known


def prints_of(
    probe: Probe, called: list[tuple[weakref.ref[torch.nn.Module], list[Any]]]
) -> list[FrozenModule]:
    """What the frozen modules that were called in a step hold now.

    Also those that an optimizer holds or held, as a rank's own teacher after it was trained: they
    keep the others' places, and the others' copies of them are known again.
    """
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
            for name, p in held_by(module)
            if not (p.requires_grad or is_piece(p) or is_local(p))
        }
        if not kept:
            continue
        was_trained = probe.is_frozen[id(module)].trained is not None
        shapes = [tuple(p.shape) for p in kept.values()]
        counts = samples_per_tensor([p.numel() for p in kept.values()])
        found.append(
            FrozenModule(
                module=type(module).__name__,
                key=zlib.crc32(repr((type(module).__name__, list(kept), shapes)).encode()),
                names=list(kept),
                held=[name for name, p in kept.items() if was_trained or id(p) in held],
                counts=counts,
                prints=take(list(kept.values()), counts),
                where=where,
            )
        )
    return found


def note_acting(probe: Probe, module: torch.nn.Module) -> None:
    """Remember the wrapper, or else the first module with something to train, that a step calls."""
    is_wrapper = isinstance(module, DistributedDataParallel)
    if probe.recent.acting is not None and not is_wrapper:
        return
    if is_wrapper or any(p.requires_grad for p in module.parameters()):
        acting = (weakref.ref(module), users_lines())
        for window in probe.each_window():
            if window.acting is None or is_wrapper:
                window.acting = acting


def note_mode(probe: Probe) -> None:
    """Only now: it may have been called to evaluate, on this rank alone, before it was trained."""
    for window in probe.each_window():
        module = None if window.acting is None else window.acting[0]()
        if module is None or window.acting is None or window.mode:
            continue
        flags = bytes(part.training for part in module.modules())
        window.mode = Mode(
            type(module).__name__, len(flags), sum(flags), zlib.crc32(flags), window.acting[1]
        )
