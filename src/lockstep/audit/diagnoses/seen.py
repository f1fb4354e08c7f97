# SPDX-License-Identifier: Apache-2.0
"""`Seen`: how gradients of some parameters were mixed in a step, and what their losses weigh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.equations import LEFT, Column, bringing, of_gradients
from lockstep.audit.expectation import APART, are_equal, main_weight, total_weight
from lockstep.audit.ledger import ADDING_UP
from lockstep.audit.mixing import Mixing, solve, unexplained
from lockstep.audit.rules.base import at_step, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.audit.equations import Equations, Numbers
    from lockstep.audit.facts import Backward, Step
    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.rules.base import Code
    from lockstep.audit.shared_track import Shared, SharedTrack

_SURE: Final = 4.0
_VAGUE: Final = 0.1


@dataclass(frozen=True)
class Seen:
    """One mixing of one step.

    Attributes:
        mixing: None where no mixing explains what was used; then `unexplained` has the numbers.
        is_whole: it is that of all parameters.
        is_assumed: nothing was sampled in this step; the mixing is that of an earlier one.
    """

    track: SharedTrack
    number: int
    mixing: Mixing | None
    is_whole: bool
    unexplained: Equations | None = None
    is_assumed: bool = False

    @cached_property
    def steps(self) -> dict[int, Step]:
        return self.track.steps(self.number)

    @property
    def ranks(self) -> list[int]:
        return self.track.ranks

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def parameters(self) -> list[Shared]:
        """Those that are mixed so."""
        seen = self.mixing or self.unexplained
        return [] if seen is None else [self.track.held[place] for place in seen.parameters]

    @cached_property
    def names(self) -> list[str]:
        return [shared.name for shared in self.parameters]

    @cached_property
    def columns(self) -> list[Column]:
        return [] if self.mixing is None else self.mixing.columns

    @cached_property
    def backwards(self) -> list[Backward]:
        """That of each column."""
        which = _concerning if self.is_assumed else bringing
        by_rank = {rank: list(which(s, self.track.key)) for rank, s in self.steps.items()}
        return [by_rank[column.rank][column.backward] for column in self.columns]

    @cached_property
    def uses(self) -> list[str]:
        """Of each column: shared by all ranks, kept by its own, lost, or unknown."""
        mixing = self.mixing
        return [] if mixing is None else [mixing.use_of(c) for c in range(len(mixing.columns))]

    @cached_property
    def is_common(self) -> bool:
        """Did all ranks use the same, and something of every backward of every rank?"""
        mixing = self.mixing
        if mixing is None or set(self.uses) != {"shared"} or not mixing.rows_are_equal:
            return False
        return {column.rank for column in self.columns} == set(self.ranks)

    @cached_property
    def coefficients(self) -> Numbers:
        """(K,), of all ranks, before a clip of the whole made all of them smaller."""
        assert self.mixing is not None
        # What is taken over from an earlier step, or from what torch does, was never clipped.
        clipped_by = 1.0 if self.is_assumed else self.clipped_by
        found: Numbers = self.mixing.coefficients.mean(axis=0) / clipped_by
        return found

    @cached_property
    def clipped_by(self) -> float:
        """The factor by which gradients that all ranks shared were clipped."""
        factor = 1.0
        for at_once in zip(*(step.clips for step in self.steps.values()), strict=False):
            if are_equal(clip.norm for clip in at_once):
                factor *= float(at_once[0].factor)
        return factor

    def used_norms(self, rank: int) -> Numbers:
        """(P,), the norms of the gradients that a rank's optimizer used, with the GradScaler's
        factor and before such a clip."""
        step = self.steps[rank]
        assert step.gradients is not None
        return step.gradients.norms * (step.scale or 1.0) / self.clipped_by

    @cached_property
    def totals(self) -> Numbers | None:
        """(K,), what all samples of each loss count in it; None where a graph does not tell."""
        return _if_all_known(total_weight(backward) for backward in self.backwards)

    @cached_property
    def main_totals(self) -> Numbers | None:
        """(K,), the same of the term of each loss that counts most, beside its penalties."""
        return _if_all_known(main_weight(backward) for backward in self.backwards)

    @cached_property
    def close(self) -> float:
        """By how much coefficients that are the same ones may differ, as a part of the largest."""
        assert self.mixing is not None
        largest = float(np.abs(self.mixing.coefficients).max())
        return max(APART, _SURE * float(self.mixing.errors.max()) / largest)

    def is_coefficient(self, wanted: float) -> bool:
        """Are all coefficients `wanted`, as far as can be known?"""
        return all(self.is_near(value, wanted) for value in self.coefficients.tolist())

    def is_near(self, value: float | None, wanted: float) -> bool:
        """Is a sum of coefficients `wanted`, as far as can be known?"""
        if value is None or self.close > _VAGUE:
            return False
        return abs(value - wanted) <= self.close * abs(wanted)

    @cached_property
    def is_in_pieces(self) -> bool:
        """Has each rank a piece of these parameters?"""
        return all(p.sharded for held in self.parameters for p in held.described.values())

    @property
    def communicates(self) -> bool:
        """Did rows of other ranks come into a loss, whose gradients then are not its own alone?"""
        return any(backward.gathered for backward in self.backwards)

    def without_inner_gradients(self) -> Seen:
        """Without what ``autograd.grad`` gave to the program, as to an inner loop or a penalty.

        It is the optimizer's only where an optimizer used it.
        """
        if self.mixing is None:
            return self
        each = zip(self.columns, self.backwards, self.uses, strict=True)
        inner = [column for column, of, use in each if of.kind == "grad" and use == "lost"]
        if len(inner) in (0, len(self.columns)):
            return self
        return replace(self, mixing=self.mixing.without(inner))

    def by_rank(self, values: Iterable[float]) -> dict[int, float]:
        """Sums over each rank's columns."""
        found: dict[int, float] = {}
        for column, value in zip(self.columns, values, strict=True):
            found[column.rank] = found.get(column.rank, 0.0) + float(value)
        return found

    @property
    def backwards_per_rank(self) -> float:
        return len(self.columns) / self.size

    @property
    def of(self) -> str:
        """`` of `weight```, where it is not all parameters."""
        return "" if self.is_whole else f" of {named(self.names)}"

    def finding(self, code: Code, message: str, fix: str, **details: Any) -> Finding:
        """With the lines of its backwards, of reductions by hand and of the step."""
        told = {
            "parameters": [] if self.is_whole else self.names,
            "where": self.lines,
            **details,
            "evidence": {**self.as_evidence(), **details.get("evidence", {})},
        }
        step = at_step(self.track, self.number, **told)
        return code.finding(f"step {self.number + 1}: {message}", fix, **step)

    @property
    def lines(self) -> list[Place]:
        step = next(iter(self.steps.values()))
        reducing = [c for c in step.collectives if c.op in _REDUCING and np.prod(c.shape) > 1]
        own = [c for c in reducing if c.parameter in self.names] or reducing
        backwards = [b.where for b in step.backwards[-1:]]
        clips = [clip.where for clip in step.clips[:1]]
        found = [*[c.where for c in own[-1:]], *clips, *backwards, step.where]
        return [place for places in found for place in places]

    def as_evidence(self) -> dict[str, Any]:
        """The coefficients, for the report."""
        if self.mixing is None:
            return {}
        return {
            "columns": [[c.rank, c.backward] for c in self.columns],
            "coefficients": {
                str(rank): [float(f"{value:.6g}") for value in row]
                for rank, row in zip(self.mixing.ranks, self.mixing.coefficients, strict=True)
            },
            "error": float(f"{self.mixing.errors.max():.1g}"),
        }


def _if_all_known(values: Iterable[float | None]) -> Numbers | None:
    found = list(values)
    return None if None in found else np.array(found, dtype=float)


_REDUCING: Final = (*ADDING_UP, "broadcast")


def seen_in(track: SharedTrack, number: int, known: Seen | None) -> Iterator[Seen]:
    """All mixings of one step, and what none of them explains.

    Args:
        known: the mixing of an earlier step. Later steps are not looked at closely; where all
            backwards counted the same then, they are taken to do so still.
    """
    equations = of_gradients(track, number)
    if equations is None:
        if known is not None and are_equal(known.coefficients, known.close):
            yield from _seen_later(track, number, float(known.coefficients.mean()))
        elif known is None and _is_averaged(track):
            yield from _seen_later(track, number, 1.0 / len(track.ranks))
        return
    mixings = solve(equations)
    for mixing in mixings:
        if any(column.backward == LEFT for column in mixing.columns):
            continue  # what a step has left behind is a matter of its own
        whole = mixing.parameters == equations.parameters
        yield Seen(track, number, mixing, whole)
    left = unexplained(equations, mixings)
    if len(left.parameter):
        yield Seen(track, number, None, not mixings, left)


def _seen_later(track: SharedTrack, number: int, coefficient: float) -> Iterator[Seen]:
    steps = track.steps(number)
    columns = [
        Column(rank, place)
        for rank, step in steps.items()
        for place, _ in enumerate(_concerning(step, track.key))
    ]
    if list(steps) != track.ranks or {c.rank for c in columns} != set(steps):
        return
    size = len(columns)
    table = np.full((len(steps), size), coefficient)
    parameters = list(range(len(track.held)))
    mixing = Mixing(parameters, track.ranks, columns, table, np.zeros((len(steps), size, size)))
    yield Seen(track, number, mixing, is_whole=True, is_assumed=True)


def _is_averaged(track: SharedTrack) -> bool:
    """By torch, of whose flat parameters nothing is known but this; lockstep weighs batches."""
    held = [p for of_rank in track.tracks.values() for p in of_rank.parameters]
    return bool(held) and all((p.sharded or p.wrapper) and not p.weighed for p in held)


def _concerning(step: Step, key: str) -> Iterator[Backward]:
    """Those that wrote an optimizer's gradients; all, where none is known to have."""
    ran = [b for b in step.backwards if b.kind == "backward"]
    yield from [b for b in ran if key in b.touched] or ran
