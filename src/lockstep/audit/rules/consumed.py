# SPDX-License-Identifier: Apache-2.0
"""What became of the gradients between backward and the step, whatever carried them.

Each rank's gradients are sampled when backward has returned and when the optimizer uses them. If
the latter are the ranks' sum, one rank's own, or W times what all ranks already shared, it shows in
the numbers: flat, asynchronous and hand-written reductions are all seen alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.rules.base import Code, Explained, first_found, numbers
from lockstep.audit.rules.clipping_hooks import BEFORE as CLIPPED
from lockstep.audit.rules.scale import TWICE, UNDIVIDED, is_made_up_for, is_one_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Step
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.world import SharedTrack, World

ONE_RANK = Code("LS107", "the gradients of one rank were used, and the others' were lost")

_CLOSE: Final = {"float16": 5e-3, "bfloat16": 2e-2}
_CLOSE_OTHERWISE: Final = 1e-4
_CLOSE_AFTER_A_HOOK: Final = 2e-2
"""Hooks send half precision; a sum of two ranks is twice their mean."""
_SMALLER: Final = 0.01
"""Factors of ranks that are further apart than this are no rounding."""
_ONE_LENGTH: Final = 0.003
_LEAST: Final = 3
"""So few elements would agree by chance."""


@dataclass(frozen=True)
class _Samples:
    """`then`: (ranks, S) after the last backward; `used`: (S,) by the optimizers of all ranks.

    `tensors` (S,) tells of which parameter each of the S elements is, and `lengths` (ranks,) how
    long all of a rank's gradients were together.
    """

    then: np.ndarray[Any, Any]
    used: np.ndarray[Any, Any]
    tensors: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    ranks: list[int]
    close: float

    def are_used(self, values: np.ndarray[Any, Any]) -> bool:
        return bool(np.abs(self.used - values).max() <= self.close * np.abs(self.used).max())

    @property
    def were_equal(self) -> bool:
        spread = self.then.max(axis=0) - self.then.min(axis=0)
        return bool(spread.max() <= self.close * np.abs(self.then).max())


class Consumed:
    """Holds what was used against what each rank had."""

    codes = (TWICE, UNDIVIDED, ONE_RANK, CLIPPED)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        if world.sync_of_lockstep():
            return  # its reduction ends after backward has: sums there are on their way
        for track in world.compared:
            known = explained.tracks | explained.sums
            if track.key in known or track.returns_to_agreement:
                continue
            found = first_found(track, _judge_step)
            if found is not None:
                yield found


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    if len(steps) < len(track.ranks) or any(s.scale is not None for s in steps.values()):
        return None
    if any(step.has_closure for step in steps.values()):
        return None  # evaluated again: not what backward left
    samples = _samples(track, steps)
    if samples is None:
        return None
    if any(step.clips for step in steps.values()):
        return None if samples.were_equal else _of_one_clipped(track, number, samples)
    if samples.were_equal:
        return _of_equal(track, number, samples, next(iter(steps.values())))
    return _of_different(track, number, samples, list(steps.values()))


def _samples(track: SharedTrack, steps: dict[int, Step]) -> _Samples | None:
    then: dict[int, list[float]] = {rank: [] for rank in steps}
    used: dict[int, list[float]] = {rank: [] for rank in steps}
    close = _CLOSE_OTHERWISE
    tensors: list[int] = []
    for place, shared in enumerate(track.parameters):
        if shared.groups != [sorted(steps)]:
            continue
        close = max(close, _CLOSE.get(shared.dtype, 0.0))
        for rank, step in steps.items():
            last = _left_by_backward(step, track.key)
            if last is None or step.gradients is None:
                return None
            if step.backwards[-1].own:
                close = max(close, _CLOSE_AFTER_A_HOOK)
            then[rank] += track.sampled(last, shared, rank)
            used[rank] += track.sampled(step.gradients, shared, rank)
        tensors += [place] * (len(next(iter(then.values()))) - len(tensors))
    before, after = np.array(list(then.values())), np.array(list(used.values()))
    whole = np.isfinite(before).all(axis=0) & np.isfinite(after).all(axis=0)
    before, after = before[:, whole], after[:, whole]
    first = after[0]
    if np.count_nonzero(first) < _LEAST or np.abs(before).max(axis=1).min() <= 1e-12:
        return None
    lengths = np.array([_length(step, track.key) for step in steps.values()])
    found = _Samples(before, first, np.array(tensors)[whole], lengths, sorted(steps), close)
    return found if all(found.are_used(row) for row in after) else None


def _left_by_backward(step: Step, key: str) -> Fingerprint | None:
    """This rank's own gradients: as a communication hook was given them, or as backward left."""
    last = step.backwards[-1] if step.backwards else None
    return None if last is None else last.own.get(key) or last.gradients.get(key)


def _length(step: Step, key: str) -> float:
    last = _left_by_backward(step, key)
    return 0.0 if last is None else float(np.linalg.norm(np.nan_to_num(last.norms)))


def _of_equal(track: SharedTrack, number: int, samples: _Samples, step: Step) -> Finding | None:
    """The wrapper had averaged already."""
    size = len(samples.ranks)
    if any(term.kind == "sum" for b in step.backwards for term in b.terms):
        return None  # a sum has to be divided yet, by what is the program's own business
    if samples.are_used(samples.then[0] * size):
        what, ratio = f"{size} times", float(size)
    elif samples.are_used(samples.then[0] / size) and len(step.backwards) == 1:
        what, ratio = f"1/{size} of", 1.0 / size
    else:
        return None
    return TWICE.finding(
        f"step {number + 1}: the gradients were equal on all ranks when backward had returned, and "
        f"the optimizer used {what} them: they were reduced, or divided by the number of ranks, "
        "once more",
        "reduce once: what backward leaves is the average over all ranks already",
        rank=track.ranks,
        step=number + 1,
        evidence={"ratio": ratio},
        where=step.where,
    )


def _of_different(
    track: SharedTrack, number: int, samples: _Samples, steps: list[Step]
) -> Finding | None:
    size = len(samples.ranks)
    if samples.are_used(samples.then.sum(axis=0)) and all(map(is_one_mean, steps)):
        if is_made_up_for(track):
            return None
        return UNDIVIDED.finding(
            f"step {number + 1}: each rank's loss is a mean over its own batch, and the optimizer "
            f"used the sum of the {size} ranks' gradients: {size} times those of the mean over all "
            "samples",
            "use op=ReduceOp.AVG, or divide by the world size after the reduction",
            rank=track.ranks,
            step=number + 1,
            evidence={"ranks": size},
            where=steps[0].where,
        )
    if samples.are_used(samples.then.mean(axis=0)):
        return None  # also where the ranks' gradients are nearly equal
    for place, rank in enumerate(samples.ranks):
        if samples.are_used(samples.then[place]):
            return _of_one(track, number, samples, rank)
    return _scaled(track, number, samples, steps[0])


def _of_one_clipped(track: SharedTrack, number: int, samples: _Samples) -> Finding | None:
    """One factor for all its elements, at most 1, makes one rank's gradients those that were used.

    The ranks' mean must be no multiple of it: gradients that nearly agree prove nothing.
    """
    if len(set(samples.tensors.tolist())) < _LEAST or _fits(samples, samples.then.mean(axis=0)):
        return None
    fitting = [
        rank for place, rank in enumerate(samples.ranks) if _fits(samples, samples.then[place])
    ]
    return _of_one(track, number, samples, fitting[0]) if len(fitting) == 1 else None


def _fits(samples: _Samples, values: np.ndarray[Any, Any]) -> bool:
    square = float(values @ values)
    factor = float(samples.used @ values) / square if square else 0.0
    return 0.0 < factor <= 1.0 + samples.close and samples.are_used(values * factor)


def _of_one(track: SharedTrack, number: int, samples: _Samples, rank: int) -> Finding:
    others = [other for other in samples.ranks if other != rank]
    return ONE_RANK.finding(
        f"step {number + 1}: the ranks had different gradients when backward had returned, "
        f"and all of them used those of rank {rank}: what ranks {others} computed is lost",
        "average: `dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`, or "
        "`lockstep.average_gradients(model)`, instead of a broadcast",
        rank=others,
        step=number + 1,
        evidence={"used": rank},
        where=next(iter(track.steps(number).values())).where,
    )


def _scaled(track: SharedTrack, number: int, samples: _Samples, step: Step) -> Finding | None:
    """A mean of gradients that each rank had clipped, or scaled to one length, before."""
    factors = _factors(samples)
    if factors is None:
        return None
    if _only_smaller(factors, samples.close):
        what = "and none larger"
    elif _to_one_length(factors, samples.lengths) and _again(track, number):
        what = "so that all have one length"
    else:
        return None
    means = dict(zip(samples.ranks, factors.mean(axis=0).tolist(), strict=True))
    return CLIPPED.finding(
        f"step {number + 1}: the optimizer used the average of gradients that each rank had "
        f"multiplied by factors of its own ({numbers(means)}, on average), {what}: they were "
        "clipped, or scaled, before the reduction",
        "clip what the reduction leaves, after it",
        rank=samples.ranks,
        step=number + 1,
        evidence={"factors": {str(r): f for r, f in means.items()}},
        where=[*(step.backwards[-1].where if step.backwards else ()), *step.where],
    )


def _again(track: SharedTrack, number: int) -> bool:
    """In another step, too: once, weights by counts make lengths equal by chance."""
    others = [_samples(track, track.steps(other)) for other in track.numbers if other != number]
    known = [(samples, _factors(samples)) for samples in others if samples is not None]
    return any(
        factors is not None and _to_one_length(factors, samples.lengths)
        for samples, factors in known
    )


def _factors(samples: _Samples) -> np.ndarray[Any, Any] | None:
    """(tensors, ranks): by what each rank's gradients were multiplied before the average.

    None where what was used is no sum of multiples of them.
    """
    size = len(samples.ranks)
    factors = []
    for tensor in set(samples.tensors.tolist()):
        of_tensor = samples.tensors == tensor
        then, used = samples.then[:, of_tensor], samples.used[of_tensor]
        if then.shape[1] < size + _LEAST or not used.any():
            continue
        found, _, rank, _ = np.linalg.lstsq(then.T, used, rcond=1e-6)
        if rank < size or np.abs(found @ then - used).max() > samples.close * np.abs(used).max():
            return None
        factors.append(size * found)
    return np.array(factors) if factors else None


def _only_smaller(factors: np.ndarray[Any, Any], close: float) -> bool:
    """A weighted mean, as by counts, makes the gradients of some ranks larger."""
    apart = bool(np.ptp(factors, axis=1).max() >= _SMALLER)
    return apart and bool(factors.min() > 0.0 and factors.max() <= 1.0 + 10 * close)


def _to_one_length(factors: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> bool:
    """One factor for all tensors of a rank, the larger the shorter its gradient was."""
    if np.ptp(factors, axis=0).max() > _SMALLER * factors.max() or factors.min() <= 0.0:
        return False
    scaled = factors.mean(axis=0) * lengths
    return bool(
        np.ptp(lengths) > _SMALLER * lengths.max() and np.ptp(scaled) <= _ONE_LENGTH * scaled.max()
    )
