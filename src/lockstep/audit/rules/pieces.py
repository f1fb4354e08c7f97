# SPDX-License-Identifier: Apache-2.0
"""Pieces of one gradient that ranks have scaled by factors of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.audit.rules.base import Explained, first_of_each, numbers
from lockstep.audit.rules.gradients import DIFFER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Step, Track
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_Samples = np.ndarray[Any, Any]

_ONE_FACTOR = 1e-3
_APART = 0.01


class Pieces:
    """Between backward and the step one factor is for all pieces: clipping's, or the scaler's."""

    codes = (DIFFER,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        return first_of_each(world, explained, _judge_step)


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    factors = {r: _factor(track.tracks[r], s) for r, s in steps.items()}
    known = {r: f for r, f in factors.items() if f is not None}
    if len(known) < len(track.ranks) or _are_one(list(known.values())):
        return None
    return DIFFER.finding(
        f"step {number + 1}: between backward and the step the pieces of one gradient "
        f"were multiplied by {numbers(known)}: each rank scaled its own",
        "clip by the norm of the whole gradient: torch.nn.utils.clip_grad_norm_ knows "
        "DTensors, FullyShardedDataParallel has `model.clip_grad_norm_`",
        rank=sorted(known),
        step=number + 1,
        evidence={"factors": {str(r): f for r, f in known.items()}},
        where=next(iter(steps.values())).where,
    )


def _factor(track: Track, step: Step) -> float | None:
    """What all pieces of a rank were multiplied by; None if by no single number."""
    then = step.backwards[-1].gradients.get(track.key) if step.backwards else None
    used = step.gradients
    pieces = [place for place, p in enumerate(track.parameters) if p.sharded]
    if then is None or used is None or step.has_closure or len(pieces) < len(track.parameters):
        return None
    before, after = then.norms[pieces], used.norms[pieces]
    there = np.isfinite(before) & np.isfinite(after) & (before > 0.0)
    if not there.any():
        return None
    factors = after[there] / before[there]
    if factors.max() - factors.min() > _ONE_FACTOR * factors.max():
        return None
    return float(factors.mean()) if _are_parallel(then.samples, used.samples) else None


def _are_parallel(before: _Samples, after: _Samples) -> bool:
    """A gradient that was put in place by hand is another one, whatever its norm."""
    if len(before) != len(after):
        return False
    there = np.isfinite(before) & np.isfinite(after)
    then, now = before[there], after[there]
    if not then.any():
        return False
    factor = float(then @ now) / float(then @ then)
    return bool(np.abs(now - factor * then).max() <= _ONE_FACTOR * np.abs(now).max())


def _are_one(factors: list[float]) -> bool:
    return max(factors) - min(factors) <= _APART * max(factors)
