# SPDX-License-Identifier: Apache-2.0
"""Random numbers that the program draws with torch between two steps, line by line."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import maybe_current_level

from lockstep.audit.facts import Draws
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.loaders import read_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_STEPS: Final = range(1, 16)
"""Before the first step parameters and data are made."""
_LINES: Final = 32
_FUNCTIONS: Final = ("rand", "randn", "randint", "normal", "bernoulli")
_ALIKE: Final = ("rand_like", "randn_like", "randint_like")
_METHODS: Final = ("normal_", "uniform_", "bernoulli_")


def install(probe: Probe) -> None:
    """Watch the functions that draw, but for those that shuffle or drop out."""
    for name in (*_FUNCTIONS, *_ALIKE):
        probe.patches.wrap_operator(name, functools.partial(_drawer, probe))
    for name in _METHODS:
        probe.patches.wrap(torch.Tensor, name, functools.partial(_drawer, probe))


def _drawer(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        drawn = original(*args, **kwargs)
        if probe.is_on and probe.steps_done in _STEPS and maybe_current_level() is None:
            probe.harmlessly(_note, probe, drawn)
        return drawn

    return watched


def _note(probe: Probe, drawn: Any) -> None:
    if probe.is_elsewhere():
        return
    where = users_lines()
    if type(drawn) is not torch.Tensor or drawn.is_meta or not where:
        return
    for window in probe.each_window():
        known = window.draws.get(where[0], Draws(where, list(drawn.shape), str(drawn.dtype)))
        if known.count or len(window.draws) < _LINES:
            window.draws[where[0]] = replace(
                known, count=known.count + 1, hash=read_on(known.hash, drawn)
            )
