# SPDX-License-Identifier: Apache-2.0
"""Steps along what the ranks' models have moved: were their moves averaged, or added up?

In local SGD with an outer optimizer, as in DiLoCo, its gradients come from no backward: they are
what each rank's model has moved since the last round. The elements that are kept of both tell
whether what the outer optimizer used is the sum of all ranks' moves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.rules.scale import UNDIVIDED, is_made_up_for, is_near

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Collective, Step
    from lockstep.audit.rules.base import Code, Explained
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_CLOSE: Final = 1e-3
"""Of the largest element: a move is a small difference of large numbers."""


class PseudoGradients:
    """Optimizers whose gradients are the sum of what all ranks' parameters have moved."""

    codes: tuple[Code, ...] = (UNDIVIDED,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for outer in world.compared:
            if outer.key in explained.tracks | explained.sums or is_made_up_for(outer):
                continue
            inners = [t for t in world.tracks if t is not outer and _is_like(t, outer)]
            found = next((f for inner in inners for f in _undivided(outer, inner)), None)
            if found is not None:
                explained.sums.add(outer.key)
                yield found


def _is_like(inner: SharedTrack, outer: SharedTrack) -> bool:
    shapes = [
        [(rank, p.shape) for rank in track.ranks for p in track.tracks[rank].parameters]
        for track in (inner, outer)
    ]
    return shapes[0] == shapes[1]


def _undivided(outer: SharedTrack, inner: SharedTrack) -> Iterator[Finding]:
    ends = [_left_by(inner, number) for number in inner.numbers]
    for number in outer.numbers:
        steps = outer.steps(number)
        call = _sum_that_was_used(next(iter(steps.values())), len(outer.ranks))
        if call is None or list(steps) != outer.ranks:
            continue
        if any(_were_added_up(steps, end) for end in ends if end is not None):
            yield _finding(outer, inner, number, call)


def _left_by(inner: SharedTrack, number: int) -> list[np.ndarray[Any, Any]] | None:
    """The elements that are kept of each rank's parameters after a step."""
    exits = [step.exit for step in inner.steps(number).values()]
    found = [e.samples for e in exits if e is not None]
    return found if len(found) == len(inner.ranks) else None


def _were_added_up(steps: dict[int, Step], ends: list[np.ndarray[Any, Any]]) -> bool:
    """Is what every rank's optimizer used the sum over ranks of what their models moved?"""
    moves = []
    for step, end in zip(steps.values(), ends, strict=True):
        if step.entry is None or step.entry.samples.shape != end.shape:
            return False
        moves.append(step.entry.samples - end)
    if not all(np.nansum(np.abs(move)) for move in moves):
        return False  # the sum of what one client moved is its mean
    together = np.sum(moves, axis=0)
    return all(
        step.gradients is not None and _is_same(step.gradients.samples, together)
        for step in steps.values()
    )


def _is_same(used: np.ndarray[Any, Any], moved: np.ndarray[Any, Any]) -> bool:
    there = np.isfinite(used) & np.isfinite(moved)
    if used.shape != moved.shape or not there.any():
        return False
    scale = float(np.abs(moved[there]).max())
    return scale > 0.0 and any(
        float(np.abs(used[there] - sign * moved[there]).max()) <= _CLOSE * scale
        for sign in (1.0, -1.0)
    )


def _sum_that_was_used(step: Step, size: int) -> Collective | None:
    """The all_reduce of one of the gradients that the optimizer used, or of all, as it left it."""
    if step.gradients is None:
        return None
    norms = step.gradients.norms
    wanted = [*norms, math.sqrt(float(np.nansum(np.square(norms))))]
    for call in step.collectives:
        is_sum = (call.op, call.reduction) == ("all_reduce", "SUM") and len(call.group) == size
        if is_sum and call.after and any(is_near(call.after, float(norm)) for norm in wanted):
            return call
    return None


def _finding(outer: SharedTrack, inner: SharedTrack, number: int, call: Collective) -> Finding:
    size = len(outer.ranks)
    kind = next(iter(outer.tracks.values())).optimizer
    return UNDIVIDED.finding(
        f"step {number + 1} of {kind}: its gradients are what the models of {size} ranks have "
        f"moved since the last round, added up and not divided: {size} times their mean move",
        "use op=ReduceOp.AVG, or divide by the number of ranks after the all_reduce",
        rank=outer.ranks,
        step=number + 1,
        evidence={"after": call.after, "ranks": size, "moved_by": inner.key},
        where=call.where,
    )
