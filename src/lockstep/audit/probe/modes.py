# SPDX-License-Identifier: Apache-2.0
"""Whether what is trained is in training mode when its backward begins."""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from lockstep.audit.facts import Mode
from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    import torch

    from lockstep.audit.probe.probe import Probe


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
