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
    from lockstep.audit.world import Shared, SharedTrack

_Factors = np.ndarray[Any, Any]

_APART: Final = 0.01
_ROUNDING: Final = 1e-3
_LEAST: Final = 16
"""So few elements may be weights of rows."""


def by_elements(track: SharedTrack, number: int) -> Finding | None:
    """Were elements made smaller between backward and the reduction, unlike on other ranks?"""
    steps = track.steps(number)
    if len(steps) < len(track.ranks) or track.differences("gradients", number):
        return None
    whole = [s for s in track.parameters if s.groups == [sorted(steps)]]
    found = [(s, f) for s in whole if (f := _factors(track, steps, s)) is not None]
    if not found:
        return None
    factors = np.concatenate([f for _, f in found], axis=1)
    if factors.shape[1] < _LEAST or not _are_limits(factors):
        return None
    names = [s.name for s, f in found if f.min() < 1.0 - _APART]
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


def _factors(track: SharedTrack, steps: dict[int, Step], shared: Shared) -> _Factors | None:
    """(ranks, elements): by what each was multiplied; None where that is not known of all ranks."""
    found = []
    for rank, step in steps.items():
        left = step.backwards[-1].gradients.get(track.key) if step.backwards else None
        calls = [c for c in step.collectives if c.given and not c.in_backward]
        given = [c.given for c in calls if c.parameter == shared.name]
        if left is None or len(given) != 1:
            return None
        before, after = np.array(track.sampled(left, shared, rank)), np.array(given[0])
        if before.shape != after.shape or not np.isfinite(before).all():
            return None
        found.append(after / np.where(before == 0.0, np.nan, before))
    factors = np.array(found)
    factors = factors[:, np.isfinite(factors).all(axis=0)]
    return factors if factors.size else None


def _are_limits(factors: _Factors) -> bool:
    if factors.min() <= 0.0 or factors.max() > 1.0 + _ROUNDING:
        return False
    total = factors.sum(axis=0)
    weights = np.ptp(total) <= _APART  # of rows, say: they add up to one
    varies = np.ptp(factors, axis=1).max() > _APART
    apart = np.ptp(factors, axis=0).max() > _APART
    return bool(varies and apart and not weights)
