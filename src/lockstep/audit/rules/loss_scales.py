# SPDX-License-Identifier: Apache-2.0
"""Loss scales written by hand: each rank divides gradients that were averaged by its own.

What a rank's loss is multiplied by, its graph says; what became of it, the gradients that the step
used. Gradients that agree although losses weigh differently are weights by design.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.rules.base import Explained, numbers
from lockstep.audit.rules.replicas import SCALE
from lockstep.audit.shared_track import names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Backward, Step
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_CLOSE: Final = {"float16": 2e-3, "bfloat16": 1e-2}
_CLOSE_OTHERWISE: Final = 1e-4
_LEAST: Final = 3
"""So few elements would agree by chance."""


class LossScales:
    """Holds the factors of the ranks' losses against what the ranks' gradients differ by."""

    codes = (SCALE,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for track in world.compared:
            if track.returns_to_agreement:
                continue
            found = _first(track)
            if found is not None:
                explained.tracks.add(track.key)
                explained.scales = True
                yield found


def _first(track: SharedTrack) -> Finding | None:
    if not any(track.differences("exit", number) for number in track.numbers):
        return None
    for number in track.numbers:
        differences = track.differences("gradients", number)
        if not differences:
            continue
        steps = track.steps(number)
        if any(step.scale is not None for step in steps.values()):
            return None  # a GradScaler's, which is known by itself
        close = _close(track)
        known = [f for f in _factors(steps) if _spread(np.array(list(f.values()))) > 2 * close]
        for factors in known:
            if _were_divided_by(track, number, factors, close):
                return _finding(track, number, factors, names_of(differences))
        # A clip leaves no trace of the scale, and scales that are nearly equal make no difference.
        if known and not any(clip["is_clipped"] for s in steps.values() for clip in s.clips):
            return None
    return None


def _close(track: SharedTrack) -> float:
    return max(_CLOSE.get(shared.dtype, _CLOSE_OTHERWISE) for shared in track.parameters)


def _spread(values: np.ndarray[Any, Any]) -> float:
    largest = float(np.abs(values).max())
    return float(np.ptp(values)) / largest if largest > 0.0 else 0.0


def _factors(steps: dict[int, Step]) -> list[dict[int, float]]:
    """By rank, what its losses were multiplied by: at the root, and down to the means they end in.

    Only where all losses of the step tell of one ratio between the ranks.
    """
    backwards = [[b for b in s.backwards if b.kind == "backward"] for s in steps.values()]
    if len({len(of_rank) for of_rank in backwards}) != 1 or not backwards[0]:
        return []
    found = []
    for read in (_of_means, _of_root):
        by_rank = [[x for b in of_rank for x in read(b)] for of_rank in backwards]
        if len({len(of_rank) for of_rank in by_rank}) != 1 or not by_rank[0]:
            continue
        table = np.array(by_rank)
        if not np.isfinite(table).all() or not table.all():
            continue
        if max(map(_spread, (table / table[0]).T)) == 0.0:
            continue
        if all(_spread(row) <= _CLOSE_OTHERWISE for row in table / table[0]):
            found.append(dict(zip(steps, np.abs(table[:, 0]).tolist(), strict=True)))
    return found


def _of_means(backward: Backward) -> list[float]:
    return [t.weight * (t.count if t.kind == "mean" else 1.0) for t in backward.terms]


def _of_root(backward: Backward) -> list[float]:
    return [] if backward.factor is None else [backward.factor]


def _were_divided_by(
    track: SharedTrack, number: int, factors: dict[int, float], close: float
) -> bool:
    """Would the gradients agree, all of them, if each rank's were multiplied by its factor?"""
    steps = track.steps(number)
    norms: dict[int, list[float]] = {rank: [] for rank in steps}
    elements: dict[int, list[float]] = {rank: [] for rank in steps}
    for shared in track.parameters:
        if shared.groups != [sorted(steps)]:
            return False
        for rank, step in steps.items():
            if step.gradients is None:
                return False
            norms[rank].append(float(step.gradients.norms[shared.index[rank]]) * factors[rank])
            sampled = track.sampled(step.gradients, shared, rank)
            elements[rank] += [value * factors[rank] for value in sampled]
    lengths, table = (np.nan_to_num(np.array(list(x.values()))) for x in (norms, elements))
    if np.count_nonzero(table[0]) < _LEAST or not np.isfinite(lengths).all():
        return False
    apart = np.ptp(lengths, axis=0) <= close * np.abs(lengths).max(axis=0)
    return bool(apart.all() and np.ptp(table, axis=0).max() <= close * np.abs(table).max())


def _finding(
    track: SharedTrack, number: int, factors: dict[int, float], names: list[str]
) -> Finding:
    step = next(iter(track.steps(number).values()))
    ratio = max(factors.values()) / min(factors.values())
    last = [b.where for b in step.backwards[-1:]]
    return SCALE.finding(
        f"step {number + 1}: the losses were multiplied by {numbers(factors)}, and the gradients "
        f"that the step used differ by the same ratio, {ratio:.6g}, the other way round: what the "
        "ranks had averaged, each divided by a scale of its own",
        "compute the scale from what all ranks share (a loss or an overflow that was reduced over "
        "ranks), or divide by it before the reduction",
        rank=sorted(factors),
        step=number + 1,
        parameters=names,
        evidence={"scale": {str(r): f for r, f in factors.items()}, "ratio": ratio},
        where=[place for places in (*last, step.where) for place in places],
    )
