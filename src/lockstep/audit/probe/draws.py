# SPDX-License-Identifier: Apache-2.0
"""Random numbers that the program draws with torch between two steps, line by line."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import maybe_current_level
from torch.utils.data import get_worker_info

from lockstep.audit.facts import Draws
from lockstep.audit.probe.batches import read_on
from lockstep.audit.probe.frames import outermost_module, users_lines

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

_STEPS: Final = 4
"""Steps after which nothing is watched any more: the rule needs three of one optimizer's."""
_LINES: Final = 32
_DRAWS: Final = 256
"""Between two steps, at most: a simulator draws for each small thing."""
_FUNCTIONS: Final = (
    "rand",
    "randn",
    "randint",
    "normal",
    "rand_like",
    "randn_like",
    "randint_like",
)


def note_step(probe: Probe) -> None:
    """Watch what draws noise from the first step on, until there is enough, as steps are taken.

    None that shuffles or drops out.

    Before it parameters and data are made, names are imported, and tables and default arguments
    hold on to functions: those are torch's own. So are methods of tensors all the time, which torch
    looks up by name for a mode or a subclass of the program's. Nothing is watched in a program that
    compiles, which would compile once more whenever what it calls is replaced.
    """
    if probe.steps_done >= _STEPS or probe.compiles:
        probe.drawing.undo()
    elif probe.drawing.is_empty and (probe.run is None or not probe.run.synchronised):
        for name in _FUNCTIONS:
            probe.drawing.wrap_operator(name, probe.afterwards(_note_drawn))


def _note_drawn(probe: Probe, drawn: Any, *_: Any) -> None:
    is_watched = probe.is_on and probe.detailed and not probe.drawing.is_empty
    if is_watched and probe.recent.drawn < _DRAWS:
        probe.recent.drawn += 1
        # A mode of the program's own does not see what we call.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            _note(probe, drawn)


def _note(probe: Probe, drawn: Any) -> None:
    if not _is_for_training(probe) or type(drawn) is not torch.Tensor or drawn.is_meta:
        return
    where = users_lines()
    if not where or probe.is_elsewhere() or get_worker_info() is not None:
        return
    held = read_on(0, drawn).to_bytes(4, "little")
    when = _when(probe)
    new = Draws(where, list(drawn.shape), str(drawn.dtype), when)
    for window in probe.each_window():
        known = window.draws.get(where[0], new)
        if known.count or len(window.draws) < _LINES:
            window.draws[where[0]] = replace(
                known,
                when="after" if when == "after" else known.when,
                count=known.count + 1,
                hash=zlib.crc32(held, known.hash),
            )


def _is_for_training(probe: Probe) -> bool:
    """Not what a backward computes once more, nor inside a transform, where no number is known."""
    if probe.in_backward or not torch.is_grad_enabled() or maybe_current_level() is not None:
        return False
    wrapped: list[Any] = [w.ref() for w in probe.wrappers]
    modes = [module.module.training for module in wrapped if module is not None]
    return any(modes) or not modes


def _when(probe: Probe) -> str:
    module = outermost_module()
    known = None if module is None else probe.is_frozen.get(id(module))
    if known is not None and known.trained is not None:
        return "within"
    return "after" if probe.recent.has_forward else "before"
