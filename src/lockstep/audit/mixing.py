# SPDX-License-Identifier: Apache-2.0
"""What each rank's optimizer used, as a mixture of what autograd brought to all ranks.

For one optimizer step, rank *r*'s gradients are ``used[r] = sum of C[r, s, b] local[s, b]`` over
the ranks *s* and their backwards *b*. The sampled elements of all tensors are the equations, and
`C` is their least-squares solution. What the columns cannot tell apart (equal data on all ranks,
too few elements) has an infinite uncertainty, and a verdict that rests on it is none: where the
system is singular the audit is silent without asking why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.equations import tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.equations import Column, Equations, Numbers

_SURE: Final = 4.0
_ZERO: Final = 1e-4
_KNOWN: Final = 0.01
"""Of the largest coefficient: one that may be further off is not known."""
_SPARE: Final = 2
"""So many more equations than unknowns, or any numbers would fit."""
_UNKNOWN: Final = 1e12
"""Stands for infinity, so that what does not depend on it cancels."""


@dataclass(frozen=True)
class Mixing:
    """How the gradients of some parameters were mixed.

    Attributes:
        parameters: their places in the track's list.
        ranks: the R ranks.
        columns: what the K columns are.
        coefficients: (R, K).
        covariance: (R, K, K), of the coefficients, from rounding; infinite where the columns cannot
            be told apart.
    """

    parameters: list[int]
    ranks: list[int]
    columns: list[Column]
    coefficients: Numbers
    covariance: Numbers

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def total(self, rank: int) -> float:
        """What one rank's coefficients add up to, which is known also of columns that are alike."""
        return float(self.coefficients[self.ranks.index(rank)].sum())

    @property
    def errors(self) -> Numbers:
        """(R, K): how far off each coefficient may be."""
        errors: Numbers = np.sqrt(np.array([np.diag(of_rank) for of_rank in self.covariance]))
        return errors

    @property
    def rows_are_equal(self) -> bool:
        """Did all ranks use the same?"""
        first, *others = self.coefficients
        allowed = _SURE * self.errors.max(axis=0) + _ZERO * np.abs(self.coefficients).max()
        return all(bool((np.abs(row - first) <= allowed).all()) for row in others)

    def row_ratios(self) -> dict[int, float] | None:
        """What each rank used, as a multiple of what the first one did; None if it is none."""
        first = self.coefficients[0]
        ratios = self.coefficients @ first / (first @ first)
        apart = np.abs(self.coefficients - np.outer(ratios, first))
        allowed = _SURE * self.errors + _ZERO * np.abs(self.coefficients).max()
        if not (apart <= allowed).all():
            return None
        return dict(zip(self.ranks, ratios.tolist(), strict=True))

    def without(self, columns: Sequence[Column]) -> Mixing:
        """The same without some of its columns."""
        kept = [at for at, column in enumerate(self.columns) if column not in columns]
        return replace(
            self,
            columns=[self.columns[at] for at in kept],
            coefficients=self.coefficients[:, kept],
            covariance=self.covariance[:, kept][:, :, kept],
        )

    def use_of(self, column: int) -> str:
        """``shared``: all ranks used it; ``kept``: only its own; ``lost``: none; ``unknown``."""
        values, errors = np.abs(self.coefficients[:, column]), self.errors[:, column]
        scale = np.abs(self.coefficients).max(axis=1)
        used = values > _ZERO * scale + _SURE * errors
        unused = (values <= _ZERO * scale + _SURE * errors) & (errors < _KNOWN * scale)
        own = self.ranks.index(self.columns[column].rank)
        if used.all():
            return "shared"
        if unused.all():
            return "lost"
        others = np.arange(len(self.ranks)) != own
        return "kept" if used[own] and unused[others].all() else "unknown"


def solve(equations: Equations) -> list[Mixing]:
    """One mixing for all parameters, or one for each set of them that has a mixing of its own.

    Parameters that no mixing explains but for rounding are in none; numbers that travelled in half
    precision are rounded as such.
    """
    found = _solve_by_sets(equations, equations.parameters)
    left = unexplained(equations, found)
    if len(left.parameter):
        coarse = replace(left, close=np.maximum(left.close, tolerance("bfloat16")))
        found += _solve_by_sets(coarse, left.parameters)
    for unit in unexplained(equations, found).units():
        one = _fit(unit, unit.parameters)
        found += [] if one is None else [one]
    return found


def unexplained(equations: Equations, mixings: Sequence[Mixing]) -> Equations:
    """Those of parameters that none of `mixings` explains."""
    explained = {place for mixing in mixings for place in mixing.parameters}
    return equations.of([place for place in equations.parameters if place not in explained])


def limit_of(equations: Equations) -> float | None:
    """The limit at which each rank cut off its elements before they were reduced, if it is that.

    Where one rank alone went beyond it, what the others do not explain of the sum is the limit.
    """
    used, close = equations.used[0], equations.close
    apart = np.abs(equations.used - used) > close * np.abs(used)
    if not np.isfinite(equations.used).all() or apart.any():
        return None
    of_ranks = [[c.rank == rank for c in equations.columns] for rank in equations.ranks]
    local = equations.local @ np.array(of_ranks, dtype=float).T
    lengths = np.abs(local).sum(axis=1)
    for total in (used * len(equations.ranks), used):  # they were averaged, or added up
        off = np.abs(local.sum(axis=1) - total) > close * lengths
        if off.sum() < _SPARE:
            continue
        others = local[off].sum(axis=1, keepdims=True) - local[off]
        for limit in np.unique(np.abs(total[off, None] - others)):
            cut = np.clip(local, -limit, limit).sum(axis=1)
            if (np.abs(cut - total) <= close * lengths * len(equations.ranks)).all():
                return float(limit)
    return None


def _solve_by_sets(equations: Equations, places: list[int]) -> list[Mixing]:
    together = _fit(equations, places)
    if together is not None:
        return [together]
    found: list[Mixing] = []
    left = list(places)
    while left:
        ones = (_fit(equations, [place]) for place in left)
        one = next((fit for fit in ones if fit is not None), None) or _each_its_own(equations, left)
        if one is None:
            break
        alike = [p for p in left if p in one.parameters or _explains(one, equations.of([p]))]
        again = _fit(equations, alike) if len(alike) > 1 else None
        found.append(again or replace(one, parameters=alike))
        left = [other for other in left if other not in alike]
    return found


def _each_its_own(equations: Equations, places: list[int]) -> Mixing | None:
    """Every rank used what it had itself: said of few elements, which would fit other mixings too.

    Equations as many as unknowns have always a solution; that this simple one fits tells enough.
    """
    for place in places:
        some = equations.of([place]).of_those_that_brought()
        own = np.array([[float(c.rank == rank) for c in some.columns] for rank in some.ranks])
        if not len(some.columns) or not own.any(axis=1).all():
            continue
        size = len(some.columns)
        one = Mixing([place], some.ranks, some.columns, own, np.zeros((len(own), size, size)))
        if _explains(one, some) and not _explains(replace(one, coefficients=own[::-1]), some):
            return one
    return None


def _fit(equations: Equations, parameters: list[int]) -> Mixing | None:
    """The solution for all of `parameters` together; None if there is none but for rounding."""
    some = equations.of(parameters).of_those_that_brought()
    size = len(some.columns)
    if not size:
        return None
    rows, spreads = [], []
    for used in some.used:
        there = np.isfinite(used) & (np.abs(some.local).max(axis=1) > 0.0)
        if there.sum() < size + _SPARE:
            return None
        solved = _solve(some.local[there], used[there], some.close[there])
        if solved is None:
            return None
        rows.append(solved[0])
        spreads.append(solved[1])
    return Mixing(parameters, some.ranks, some.columns, np.array(rows), np.array(spreads))


def _solve(local: Numbers, used: Numbers, close: Numbers) -> tuple[Numbers, Numbers] | None:
    scale = np.abs(local).max(axis=1)
    rows = local / scale[:, None]
    goal = used / scale
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0.0] = 1.0
    left, values, right = np.linalg.svd(rows / lengths, full_matrices=False)
    noise = float(close.max())
    kept = values > noise * values[0]
    inverse = np.where(kept, 1.0 / np.where(kept, values, 1.0), 0.0)
    solution = (right.T @ (inverse * (left.T @ goal))) / lengths
    if not _is_rounding(local, used, close, solution):
        return None
    # An error of `noise` in each element, and directions that no element tells of.
    level = noise * float(np.abs(solution).max())
    variances = np.where(kept, (level * inverse) ** 2, np.inf)
    with np.errstate(invalid="ignore"):
        spread = _spread(right, variances) / np.outer(lengths, lengths)
    return solution, spread


def _spread(right: Numbers, variances: Numbers) -> Numbers:
    """``right.T @ diag(variances) @ right`` where some variances are infinite."""
    known = np.isfinite(variances)
    spread = (right[known].T * variances[known]) @ right[known]
    if not known.all():
        unknown = right[~known]
        spread = spread + _UNKNOWN * (unknown.T @ unknown)
    return spread


def _is_rounding(local: Numbers, used: Numbers, close: Numbers, solution: Numbers) -> bool:
    # By the largest coefficient: an element that is zero on one rank tells nothing of the others.
    terms = np.abs(local).sum(axis=1) * float(np.abs(solution).max())
    return bool((np.abs(local @ solution - used) <= close * np.maximum(terms, np.abs(used))).all())


def _explains(mixing: Mixing, some: Equations) -> bool:
    some = some.of_those_that_brought()
    if some.columns != mixing.columns:
        return False
    for row, used in zip(mixing.coefficients, some.used, strict=True):
        there = np.isfinite(used)
        if not _is_rounding(some.local[there], used[there], some.close[there], row):
            return False
    return True
