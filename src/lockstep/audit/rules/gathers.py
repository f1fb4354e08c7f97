# SPDX-License-Identifier: Apache-2.0
"""Losses over rows of other ranks: does the gradient find its way back?

With W ranks, a gather without gradient leaves out what the other ranks' losses owe to this rank's
rows. If every rank computes the whole loss, the ranks' gradients add up to the truth, and their
average is 1/W of it: a factor W, or a sum in place of the average, makes it right for what comes
before the gather. If each rank computes its own rows, nothing does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lockstep.audit.diagnoses.seen import seen_in
from lockstep.audit.expectation import is_near
from lockstep.audit.rules.base import Code, at_step, each_step

if TYPE_CHECKING:
    from lockstep.audit.facts import Alias, Backward, Gathered, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack

WITHOUT = Code("LS207", "gathered without gradient")
WRONG = Code("LS208", "gathered with the wrong backward")
OUTSIDE = Code("LS211", "reduced outside autograd")

_FIX = (
    "use `lockstep.gather(rows)`, or torch.distributed.nn.functional.all_gather, whose backward "
    "adds up what all ranks owe to the rows"
)


@dataclass(frozen=True)
class _Case:
    """A tensor that was communicated and entered the losses of all ranks, as the first has it."""

    track: SharedTrack
    number: int
    fact: Gathered
    backwards: tuple[Backward, ...]

    @property
    def steps(self) -> dict[int, Step]:
        return self.track.steps(self.number)

    @property
    def is_global(self) -> bool:
        """Does every rank compute the whole loss, and not its own part of it?"""
        losses = [b.loss for b in self.backwards]
        return all(is_near(loss, losses[0] or 0.0) for loss in losses)

    @property
    def factor(self) -> float:
        """What all elements of the loss weigh together: 1 for a mean, W for a mean times W."""
        totals = [abs(t.weight) * t.count for t in self.backwards[0].terms if t.kind == "mean"]
        # A symmetric loss is half of one direction and half of the other.
        return sum(totals) if totals else 1.0

    @property
    def counts_for_all(self) -> bool:
        """Do all ranks compute one loss, times their number?"""
        return self.is_global and is_near(self.factor, self.fact.group)

    @cached_property
    def reductions(self) -> list[float]:
        """The factors with which the ranks' gradients were added up, that of most parameters first.

        As in the last step that was looked at closely, for one behind it; 1/W for an average, where
        none was measured.
        """
        earlier = [number for number in reversed(self.track.numbers) if number <= self.number]
        found = (_factors(self.track, number) for number in earlier)
        return next(filter(None, found), [1.0 / self.fact.group])

    @property
    def remains(self) -> float:
        """The part of its gradient that what comes before the gather gets, of one loss of all."""
        return self.factor * self.reductions[0]

    @property
    def makes_up_for_it(self) -> bool:
        """Do all ranks compute one loss, whose factor and reduction leave it as it is?"""
        return self.is_global and any(is_near(self.factor * each, 1.0) for each in self.reductions)

    @property
    def speaks(self) -> bool:
        """Does a backward communicate?"""
        return any(c.in_backward for step in self.steps.values() for c in step.collectives)

    @property
    def has_own_samples(self) -> bool:
        """Was each rank given others? Else they may share the work on the same ones."""
        return self.track.fed(self.number) == "own"

    def finding(self, code: Code, message: str, fix: str, **evidence: float) -> Finding:
        fact = self.fact
        return code.finding(
            f"step {self.number + 1}: {message}",
            fix,
            evidence={"op": fact.op, "rows": fact.shape, "ranks": fact.group, **evidence},
            **at_step(self.track, self.number, where=fact.where),
        )


def _factors(track: SharedTrack, number: int) -> list[float]:
    seen = [s for s in seen_in(track, number, None) if s.is_common]
    seen.sort(key=lambda s: -len(s.parameters))
    return [float(s.coefficients[0]) for s in seen if s.is_coefficient(s.coefficients[0])]


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    for at_once in zip(*(s.backwards for s in track.steps(number).values()), strict=False):
        for place, fact in enumerate(at_once[0].gathered):
            if any(len(b.gathered) <= place for b in at_once):
                continue
            case = _Case(track, number, fact, at_once)
            found = _outside(case) if fact.op == "all_reduce" else _gathered(case)
            if found is not None:
                return found
    return None


GATHERS = each_step((WITHOUT, WRONG, OUTSIDE), _judge_step)
"""Judges each backward in whose graph values of other ranks were found."""


def _gathered(case: _Case) -> Finding | None:
    fact, size = case.fact, case.fact.group
    if fact.differentiable and (case.speaks or fact.adjoint):
        if not case.counts_for_all:
            return None
        return case.finding(
            WRONG,
            f"the gather's backward adds up what all ranks owe, every rank computes the whole "
            f"loss, and the loss is multiplied by {size} as well: the gradients before the "
            f"gather are {size} times too large",
            "leave the factor out of the loss",
            ratio=float(size),
        )
    code, what = (
        (WRONG, "the gather's backward communicates nothing: what it gives back is this rank's own")
        if fact.differentiable
        else (WITHOUT, f"rows that have a gradient were {_sent(fact)} and entered the loss")
    )
    if case.makes_up_for_it:
        return None
    if case.is_global:
        return case.finding(
            code,
            f"{what}; every rank computes the same loss, so what comes before the gather gets "
            f"{case.remains:.3g} of its gradient",
            _FIX,
            ratio=case.remains,
        )
    return case.finding(
        code,
        f"{what}; each rank computes its own part of the loss, and what the other ranks' parts owe "
        "to these rows is missing, so that the gradient points elsewhere",
        _FIX,
    )


def _sent(fact: Gathered) -> str:
    return "gathered without one" if "gather" in fact.op else "sent to other ranks without it"


def _outside(case: _Case) -> Finding | None:
    fact, size = case.fact, case.fact.group
    scalar = not fact.shape or all(d == 1 for d in fact.shape)
    if fact.differentiable:
        return _summed_twice(case) if scalar else _without_adjoint(case)
    alias = fact.alias
    if alias is not None and not _tells(case, alias):
        return None
    if scalar and (alias is None or not alias.is_nonlinear):
        if not is_near(abs(fact.weight or 0.0) * size, 1.0) or fact.reduction != "SUM":
            return None
        return case.finding(
            OUTSIDE,
            f"the loss was added up over {size} ranks in place, which autograd does not see, and "
            f"divided by {size}; the gradients are averaged again: they are 1/{size} of the truth",
            "call backward on this rank's own loss, and all_reduce a detached copy for printing",
            ratio=1.0 / size,
        )
    if case.makes_up_for_it:
        return None
    missing, ratio = "what other ranks owe to it is missing", {}
    if case.is_global and fact.reduction == "SUM":
        ratio = {"ratio": case.remains}
        missing = (
            f"every rank computes the same loss, so what comes before the sum gets "
            f"{ratio['ratio']:.3g} of its gradient"
        )
    return case.finding(
        OUTSIDE,
        "a tensor that has a gradient was added up over ranks in place, which autograd does not "
        f"see, and entered the loss: {missing}",
        "use torch.distributed.nn.functional.all_reduce, whose backward adds up as well",
        **ratio,
    )


def _tells(case: _Case, alias: Alias) -> bool:
    """Is a sum that was made behind autograd's back certainly one whose gradient is too small?

    A mean over ranks made so is right where all compute one loss from it and a wrapper averages,
    and so is a sum where the loss is multiplied by their number. A sum from which the loss is
    computed by sums and products with numbers changes no gradient.
    """
    fact, size, steps = case.fact, case.fact.group, case.steps
    averaged = all(any(f.armed for f in b.wrappers.values()) for b in case.backwards)
    if fact.reduction != "SUM" or size < len(steps) or not averaged or not case.has_own_samples:
        return False
    if alias.is_nonlinear:
        return not any(is_near(f / size, max(1.0, round(f / size))) for f in alias.factors)
    once = all(len(step.backwards) == 1 for step in steps.values())  # else 1/W may be their number
    return once and is_near(abs(fact.weight or 0.0) * size, 1.0)


def _without_adjoint(case: _Case) -> Finding | None:
    """Added up over ranks that have other samples each, by a Function whose backward is local.

    Ranks that share one sample's work have the same inputs; there this can be right.
    """
    data_parallel = any(p.wrapper for p in case.track.parameters)
    if case.speaks or not case.fact.of_input or not data_parallel:
        return None
    if case.fact.group < len(case.steps) or not case.has_own_samples:
        return None
    return case.finding(
        WRONG,
        "an autograd Function adds a tensor up over ranks in its forward, and its backward "
        "communicates nothing: what the other ranks' losses owe to this rank's part is missing",
        "add the gradients up over ranks in its backward as well, or use "
        "torch.distributed.nn.functional.all_reduce, which does",
    )


def _summed_twice(case: _Case) -> Finding | None:
    """Its backward adds up as well: what each rank's own loss weighs is W times its weight here."""
    size = case.fact.group
    if case.fact.reduction != "SUM" or not is_near(abs(case.fact.weight or 0.0), 1.0):
        return None
    return case.finding(
        WRONG,
        f"the ranks' losses were added up with a gradient, and backward adds up what all {size} "
        f"ranks owe: every rank's loss counts {size} times, and the gradients are averaged over "
        f"ranks after that: they are {size} times those of the mean over all samples",
        f"divide by {size} after the sum, or call backward on this rank's own loss and all_reduce "
        "a detached copy for printing",
        ratio=float(size),
    )
