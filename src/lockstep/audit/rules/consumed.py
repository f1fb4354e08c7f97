# SPDX-License-Identifier: Apache-2.0
"""What became of the gradients between backward and the step, whatever carried them.

Each rank's gradients are sampled when backward has returned and when the optimizer uses them. If
the latter are the ranks' sum, one rank's own, or W times what all ranks already shared, it shows in
the numbers: flat, asynchronous and hand-written reductions are all seen alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.rules.base import Code, Explained, first_found, named, numbers
from lockstep.audit.rules.clipping_hooks import BEFORE as CLIPPED
from lockstep.audit.rules.multiples import LEAST, Samples, factors_of, samples_of
from lockstep.audit.rules.scale import (
    TWICE,
    UNDIVIDED,
    compute_one_loss,
    is_made_up_for,
    is_one_mean,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Step
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

ONE_RANK = Code("LS107", "the gradients of one rank were used, and the others' were lost")

_SMALLER: Final = 0.01
"""Factors of ranks that are further apart than this are no rounding."""
_ONE_LENGTH: Final = 0.003


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
    samples = samples_of(track, steps)
    if samples is None:
        return None
    if any(step.clips for step in steps.values()):
        return None if samples.were_equal else _of_one_clipped(track, number, samples)
    if samples.were_equal:
        return _of_equal(track, number, samples, next(iter(steps.values())))
    return _of_different(track, number, samples, list(steps.values()))


def _of_equal(track: SharedTrack, number: int, samples: Samples, step: Step) -> Finding | None:
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
    track: SharedTrack, number: int, samples: Samples, steps: list[Step]
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
    return _partly(track, number, samples, steps) or _scaled(track, number, samples, steps[0])


def _partly(track: SharedTrack, number: int, samples: Samples, steps: list[Step]) -> Finding | None:
    """The mean of some gradients, and of others the sum, or one rank's own."""
    apart: dict[str | int, list[int]] = {}
    for parameter in samples.parameters:
        if np.count_nonzero(samples.of(parameter).then.any(axis=1)) == 1:
            continue  # of a task that one rank has: the sum is its own
        what = _used_of(samples.of(parameter))
        if what is None:
            return None
        apart.setdefault(what, []).append(parameter)
    means, *others = apart.pop("mean", []), *apart
    if not means or len(others) != 1:
        return None
    what, names = others[0], [track.parameters[p].name for p in apart[others[0]]]
    if isinstance(what, int):
        return _of_one(track, number, samples, what, names)
    if not all(map(is_one_mean, steps)) or compute_one_loss(steps):
        return None
    if any(b.gathered for s in steps for b in s.backwards):
        return None
    if any(call.parameter in names for s in steps for call in s.collectives):
        return None  # on the same way as others, and made larger after it
    size = len(samples.ranks)
    return UNDIVIDED.finding(
        f"step {number + 1}: each rank's loss is a mean over its own batch, and the optimizer used "
        f"the sum of the {size} ranks' gradients of {named(names)}, and the mean of all others': "
        f"they are {size} times those of the mean over all samples",
        f"divide the gradients of {named(names)} by the world size, too",
        rank=track.ranks,
        step=number + 1,
        parameters=names,
        evidence={"ranks": size},
        where=[*steps[0].backwards[-1].where, *steps[0].where],
    )


def _used_of(samples: Samples) -> str | int | None:
    """Of one parameter's gradients: ``mean``, ``sum``, or whose own, by its rank."""
    if samples.are_used(samples.then.mean(axis=0)):
        return "mean"
    if samples.are_used(samples.then.sum(axis=0)):
        return "sum"
    whose = [r for r, own in zip(samples.ranks, samples.then, strict=True) if samples.are_used(own)]
    return whose[0] if len(whose) == 1 else None


def _of_one_clipped(track: SharedTrack, number: int, samples: Samples) -> Finding | None:
    """One factor for all its elements, at most 1, makes one rank's gradients those that were used.

    The ranks' mean must be no multiple of it: gradients that nearly agree prove nothing.
    """
    if len(set(samples.tensors.tolist())) < LEAST or _fits(samples, samples.then.mean(axis=0)):
        return None
    fitting = [
        rank for place, rank in enumerate(samples.ranks) if _fits(samples, samples.then[place])
    ]
    return _of_one(track, number, samples, fitting[0]) if len(fitting) == 1 else None


def _fits(samples: Samples, values: np.ndarray[Any, Any]) -> bool:
    square = float(values @ values)
    factor = float(samples.used @ values) / square if square else 0.0
    return 0.0 < factor <= 1.0 + samples.close and samples.are_used(values * factor)


def _of_one(
    track: SharedTrack, number: int, samples: Samples, rank: int, names: list[str] | None = None
) -> Finding:
    others = [other for other in samples.ranks if other != rank]
    of = f" for {named(names)}, and the mean of all others" if names else ""
    return ONE_RANK.finding(
        f"step {number + 1}: the ranks had different gradients when backward had returned, "
        f"and all of them used those of rank {rank}{of}: what ranks {others} computed is lost",
        "average: `dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`, or "
        "`lockstep.average_gradients(model)`, instead of a broadcast",
        rank=others,
        step=number + 1,
        parameters=names or [],
        evidence={"used": rank},
        where=next(iter(track.steps(number).values())).where,
    )


def _scaled(track: SharedTrack, number: int, samples: Samples, step: Step) -> Finding | None:
    """A mean of gradients that each rank had clipped, or scaled to one length, before."""
    factors = factors_of(samples)
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
    others = [samples_of(track, track.steps(other)) for other in track.numbers if other != number]
    known = [(samples, factors_of(samples)) for samples in others if samples is not None]
    return any(
        factors is not None and _to_one_length(factors, samples.lengths)
        for samples, factors in known
    )


def _only_smaller(factors: np.ndarray[Any, Any], close: float) -> bool:
    """A weighted mean, as by counts, makes the gradients of some ranks larger, others smaller."""
    apart = np.ptp(factors, axis=1) >= _SMALLER
    most = 1.0 + min(10 * close, _SMALLER)
    lost = factors.mean(axis=1) < 1.0 - _SMALLER / 4
    return bool((apart & lost).any() and factors.min() > 0.0 and factors.max() <= most)


def _to_one_length(factors: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> bool:
    """One factor for all tensors of a rank, the larger the shorter its gradient was."""
    if np.ptp(factors, axis=0).max() > _SMALLER * factors.max() or factors.min() <= 0.0:
        return False
    scaled = factors.mean(axis=0) * lengths
    return bool(
        np.ptp(lengths) > _SMALLER * lengths.max() and np.ptp(scaled) <= _ONE_LENGTH * scaled.max()
    )
