# SPDX-License-Identifier: Apache-2.0
"""Gradients whose elements a rank makes smaller, by factors of their own, and then reduces.

Limits for each unit or element, as of adaptive clipping. A rank's weight, as by counts, is one
factor for all elements; what is compressed has elements that vanish or grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.rules.base import numbers
from lockstep.audit.rules.clipping_hooks import BEFORE

if TYPE_CHECKING:
    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Step
    from lockstep.audit.shared_track import Shared, SharedTrack

_Numbers = np.ndarray[Any, Any]

_APART: Final = 0.01
_ROUNDING: Final = 1e-3
_MUCH: Final = 0.5
"""What is rounded to few bits loses less."""
_LEAST: Final = 16
"""So few elements may be weights of rows."""


def by_elements(track: SharedTrack, number: int) -> Finding | None:
    """Were elements made smaller between backward and the reduction, unlike on other ranks?"""
    seen = _seen(track, number)
    if seen is None or (number + 1 in track.numbers and _seen(track, number + 1) is None):
        return None
    names, factors = seen
    steps = track.steps(number)
    least = dict(zip(steps, factors.min(axis=1).tolist(), strict=True))
    step = next(iter(steps.values()))
    calls = [c.where for c in step.collectives if c.parameter in names and c.given]
    return BEFORE.finding(
        f"step {number + 1}: between backward and the all_reduce each rank made elements of its "
        f"own gradients smaller, some by more than others and none larger (down to "
        f"{numbers(least)}): they were clipped, or scaled, before the reduction",
        "clip what the reduction leaves, after it",
        rank=track.ranks,
        step=number + 1,
        parameters=names,
        evidence={"least": {str(r): f for r, f in least.items()}},
        where=[*step.backwards[-1].where, *calls[0], *step.where],
    )


def _seen(track: SharedTrack, number: int) -> tuple[list[str], _Numbers] | None:
    """The parameters, and (ranks, elements): by what each element was multiplied."""
    steps = track.steps(number)
    if len(steps) < len(track.ranks) or track.differences("gradients", number):
        return None
    whole = [s for s in track.parameters if s.groups == [sorted(steps)]]
    found = [(s, given) for s in whole if (given := _given(track, steps, s)) is not None]
    if not found:
        return None
    before, after, used = np.concatenate([given for _, given in found], axis=2)
    if not _is_multiple(used[0], after.sum(axis=0)):
        return None  # divided by what the ranks' weights add up to, say
    there = (before != 0.0).all(axis=0)
    factors = after[:, there] / before[:, there]
    if factors.shape[1] < _LEAST or not _are_limits(factors):
        return None
    return [s.name for s, (left, given, _) in found if (left != given).any()], factors


def _given(track: SharedTrack, steps: dict[int, Step], shared: Shared) -> _Numbers | None:
    """(3, ranks, elements): after backward, as they were handed over, as they were used."""
    found = []
    for rank, step in steps.items():
        left = step.backwards[-1].gradients.get(track.key) if step.backwards else None
        calls = [c for c in step.collectives if c.given and not c.in_backward]
        given = [c.given for c in calls if c.parameter == shared.name]
        if left is None or step.gradients is None or len(given) != 1:
            return None
        before, used = (track.sampled(held, shared, rank) for held in (left, step.gradients))
        if not len(before) == len(given[0]) == len(used):
            return None
        found.append([before, given[0], used])
    numbers = np.array(found).swapaxes(0, 1)
    return numbers if np.isfinite(numbers).all() else None


def _is_multiple(used: _Numbers, total: _Numbers) -> bool:
    """By one factor, as the number of ranks or a clip of the whole."""
    square = float(total @ total)
    factor = float(used @ total) / square if square else 0.0
    return bool(np.abs(used - factor * total).max() <= _ROUNDING * np.abs(used).max())


def _are_limits(factors: _Numbers) -> bool:
    if factors.min() <= 0.0 or factors.max() > 1.0 + _ROUNDING:
        return False
    total = factors.sum(axis=0)
    weights = np.ptp(total) <= _APART  # of rows, say: they add up to one
    varies = np.ptp(factors, axis=1).max() > _APART and factors.min() < _MUCH
    apart = np.ptp(factors, axis=0).max() > _APART
    return bool(varies and apart and not weights)
