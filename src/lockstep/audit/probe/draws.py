# SPDX-License-Identifier: Apache-2.0
"""Random numbers that the program draws with torch between two steps, line by line."""

from __future__ import annotations

import functools
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import maybe_current_level
from torch.utils.data import get_worker_info

from lockstep.audit.facts import Draws
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.loaders import read_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_STEPS: Final = 16
_LINES: Final = 32
_FUNCTIONS: Final = (
    "rand",
    "randn",
    "randint",
    "normal",
    "rand_like",
    "randn_like",
    "randint_like",
)
_METHODS: Final = ("normal_", "uniform_")


def install(probe: Probe) -> None:
    """Watch the functions that draw noise, for the first steps; none that shuffles or drops out."""
    for name in _FUNCTIONS:
        probe.drawing.wrap_operator(name, functools.partial(_drawer, probe))
    for name in _METHODS:
        probe.drawing.wrap(torch.Tensor, name, functools.partial(_drawer, probe))


def note_step(probe: Probe) -> None:
    """An optimizer has stepped: are there enough?"""
    if probe.steps_done >= _STEPS:
        probe.drawing.undo()


def _drawer(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        drawn = original(*args, **kwargs)
        # Before the first step parameters and data are made.
        if probe.is_on and probe.steps_done and probe.detailed and maybe_current_level() is None:
            probe.harmlessly(_note, probe, drawn)
        return drawn

    return watched


def _note(probe: Probe, drawn: Any) -> None:
    if type(drawn) is not torch.Tensor or drawn.is_meta or probe.is_elsewhere():
        return
    where = users_lines()
    if not where or get_worker_info() is not None:
        return
    held = read_on(0, drawn).to_bytes(4, "little")
    for window in probe.each_window():
        known = window.draws.get(where[0], Draws(where, list(drawn.shape), str(drawn.dtype)))
        if known.count or len(window.draws) < _LINES:
            window.draws[where[0]] = replace(
                known, count=known.count + 1, hash=zlib.crc32(held, known.hash)
            )
