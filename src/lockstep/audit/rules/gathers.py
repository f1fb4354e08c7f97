# SPDX-License-Identifier: Apache-2.0
"""Losses over rows of other ranks: does the gradient find its way back?

With W ranks, a gather without gradient leaves out what the other ranks' losses owe to this rank's
rows. If every rank computes the whole loss, what is left is 1/W of the truth, and a factor W makes
it right for what comes before the gather; if each rank computes its own rows, nothing does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.audit.rules.base import Code, first_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Alias, Backward, Gathered, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

WITHOUT = Code("LS207", "gathered without gradient")
WRONG = Code("LS208", "gathered with the wrong backward")
OUTSIDE = Code("LS211", "reduced outside autograd")

_CLOSE = 1e-4
_FIX = (
    "use `lockstep.gather(rows)`, or torch.distributed.nn.functional.all_gather, whose backward "
    "adds up what all ranks owe to the rows"
)


class Gathers:
    """Judges each backward in whose graph values of other ranks were found."""

    codes = (WITHOUT, WRONG, OUTSIDE)

    def judge(self, world: World) -> Iterable[Finding]:
        return first_of_each(world.compared, _judge_step)


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    for at_once in zip(*(s.backwards for s in steps.values()), strict=False):
        for place, fact in enumerate(at_once[0].gathered):
            if any(len(b.gathered) <= place for b in at_once):
                continue
            found = (
                _outside(track, number, fact, at_once, steps)
                if fact.op == "all_reduce"
                else _gathered(track, number, fact, at_once, steps)
            )
            if found is not None:
                return found
    return None


def _gathered(
    track: SharedTrack,
    number: int,
    fact: Gathered,
    backwards: tuple[Backward, ...],
    steps: dict[int, Step],
) -> Finding | None:
    is_global = _is_global(backwards)
    factor = _factor(backwards[0])
    size = fact.group
    speaks = any(c.in_backward for s in steps.values() for c in s.collectives)
    if fact.differentiable and (speaks or fact.adjoint):
        if is_global and _close(factor, float(size)):
            return _as_finding(
                WRONG,
                track,
                number,
                fact,
                f"the gather's backward adds up what all ranks owe, every rank computes the whole "
                f"loss, and the loss is multiplied by {size} as well: the gradients before the "
                f"gather are {size} times too large",
                "leave the factor out of the loss",
                {"ratio": float(size)},
            )
        return None
    code, what = (
        (WRONG, "the gather's backward communicates nothing: what it gives back is this rank's own")
        if fact.differentiable
        else (WITHOUT, f"rows that have a gradient were {_sent(fact)} and entered the loss")
    )
    if is_global:
        if _close(factor, float(size)):
            return None
        ratio = factor / size
        return _as_finding(
            code,
            track,
            number,
            fact,
            f"{what}; every rank computes the same loss, so what comes before the gather gets "
            f"{ratio:.3g} of its gradient",
            _FIX,
            {"ratio": ratio},
        )
    return _as_finding(
        code,
        track,
        number,
        fact,
        f"{what}; each rank computes its own part of the loss, and what the other ranks' parts owe "
        "to these rows is missing, so that the gradient points elsewhere",
        _FIX,
        {},
    )


def _sent(fact: Gathered) -> str:
    return "gathered without one" if "gather" in fact.op else "sent to other ranks without it"


def _is_global(backwards: tuple[Backward, ...]) -> bool:
    """Does every rank compute the whole loss, and not its own part of it?"""
    losses = [b.loss for b in backwards]
    return all(x is not None and _close(x, losses[0] or 0.0) for x in losses)


def _factor(backward: Backward) -> float:
    """What all elements of the loss weigh together: 1 for a mean, W for a mean times W."""
    totals = [abs(t.weight) * t.count for t in backward.terms if t.kind == "mean"]
    # A symmetric loss is half of one direction and half of the other.
    return sum(totals) if totals else 1.0


def _outside(
    track: SharedTrack,
    number: int,
    fact: Gathered,
    backwards: tuple[Backward, ...],
    steps: dict[int, Step],
) -> Finding | None:
    size = fact.group
    weight = fact.weight
    scalar = not fact.shape or all(d == 1 for d in fact.shape)
    if fact.differentiable:
        if scalar:
            return _summed_twice(track, number, fact)
        return _without_adjoint(track, number, fact, steps)
    alias = fact.alias
    if alias is not None and not _tells(alias, fact, backwards, steps):
        return None
    if scalar and (alias is None or not alias.is_nonlinear):
        if weight is None or not _close(abs(weight) * size, 1.0) or fact.reduction != "SUM":
            return None
        return _as_finding(
            OUTSIDE,
            track,
            number,
            fact,
            f"the loss was added up over {size} ranks in place, which autograd does not see, and "
            f"divided by {size}; the gradients are averaged again: they are 1/{size} of the truth",
            "call backward on this rank's own loss, and all_reduce a detached copy for printing",
            {"ratio": 1.0 / size},
        )
    if _is_global(backwards) and _close(_factor(backwards[0]), float(size)):
        return None
    missing, ratio = "what other ranks owe to it is missing", {}
    if _is_global(backwards) and fact.reduction == "SUM":
        ratio = {"ratio": _factor(backwards[0]) / size}
        missing = (
            f"every rank computes the same loss, so what comes before the sum gets "
            f"{ratio['ratio']:.3g} of its gradient"
        )
    return _as_finding(
        OUTSIDE,
        track,
        number,
        fact,
        "a tensor that has a gradient was added up over ranks in place, which autograd does not "
        f"see, and entered the loss: {missing}",
        "use torch.distributed.nn.functional.all_reduce, whose backward adds up as well",
        ratio,
    )


def _tells(
    alias: Alias,
    fact: Gathered,
    backwards: tuple[Backward, ...],
    steps: dict[int, Step],
) -> bool:
    """Is a sum that was made behind autograd's back certainly one whose gradient is too small?

    A mean over ranks made so is right where all compute one loss from it and a wrapper averages,
    and so is a sum where the loss is multiplied by their number. A sum from which the loss is
    computed by sums and products with numbers changes no gradient.
    """
    size = fact.group
    fed = {step.fed for step in steps.values()}
    averaged = all(any(f.armed for f in b.wrappers.values()) for b in backwards)
    if fact.reduction != "SUM" or size < len(steps) or not averaged:
        return False
    if len(fed) < len(steps) or None in fed:
        return False  # they may share the work on the same samples
    if alias.is_nonlinear:
        return not any(_close(f / size, max(1.0, round(f / size))) for f in alias.factors)
    once = all(len(step.backwards) == 1 for step in steps.values())  # else 1/W may be their number
    return once and _close(abs(fact.weight or 0.0) * size, 1.0)


def _without_adjoint(
    track: SharedTrack, number: int, fact: Gathered, steps: dict[int, Step]
) -> Finding | None:
    """Added up over ranks that have other samples each, by a Function whose backward is local.

    Ranks that share one sample's work have the same inputs; there this can be right.
    """
    fed = {step.fed for step in steps.values()}
    speaks = any(c.in_backward for step in steps.values() for c in step.collectives)
    data_parallel = any(p.wrapper for p in track.parameters)
    if speaks or not fact.of_input or not data_parallel or fact.group < len(steps):
        return None
    if len(fed) < len(steps) or None in fed:
        return None
    return _as_finding(
        WRONG,
        track,
        number,
        fact,
        "an autograd Function adds a tensor up over ranks in its forward, and its backward "
        "communicates nothing: what the other ranks' losses owe to this rank's part is missing",
        "add the gradients up over ranks in its backward as well, or use "
        "torch.distributed.nn.functional.all_reduce, which does",
        {},
    )


def _summed_twice(track: SharedTrack, number: int, fact: Gathered) -> Finding | None:
    """Its backward adds up as well: what each rank's own loss weighs is W times its weight here."""
    size, weight = fact.group, fact.weight
    if weight is None or fact.reduction != "SUM" or not _close(abs(weight), 1.0):
        return None
    return _as_finding(
        WRONG,
        track,
        number,
        fact,
        f"the ranks' losses were added up with a gradient, and backward adds up what all {size} "
        f"ranks owe: every rank's loss counts {size} times, and the gradients are averaged over "
        f"ranks after that: they are {size} times those of the mean over all samples",
        f"divide by {size} after the sum, or call backward on this rank's own loss and all_reduce "
        "a detached copy for printing",
        {"ratio": float(size)},
    )


def _close(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _CLOSE * max(abs(wanted), 1e-12)


def _as_finding(
    code: Code,
    track: SharedTrack,
    number: int,
    fact: Gathered,
    message: str,
    fix: str,
    evidence: dict[str, Any],
) -> Finding:
    return code.finding(
        f"step {number + 1}: {message}",
        fix,
        rank=track.ranks,
        step=number + 1,
        evidence={"op": fact.op, "rows": fact.shape, "ranks": fact.group, **evidence},
        where=fact.where,
    )
