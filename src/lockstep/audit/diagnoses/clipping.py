# SPDX-License-Identifier: Apache-2.0
"""Gradients that each rank made smaller before they were averaged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.expectation import are_equal, main_term
from lockstep.audit.mixing import limit_of
from lockstep.audit.rules.base import Code, named, numbers

if TYPE_CHECKING:
    from lockstep.audit.diagnoses.seen import Seen
    from lockstep.audit.equations import Numbers
    from lockstep.audit.finding import Finding

BEFORE: Final = Code("LS209", "clipped before the reduction", "warning")

_FIX: Final = (
    "clip after the last backward of the step has reduced the gradients: between the "
    "synchronising backward (or the all_reduce) and `optimizer.step()`"
)


def scaled_before(seen: Seen) -> Finding | None:
    """Losses weigh the same, and their gradients do not: the longer one was, the less it counts.

    Or one counts in full, and the others less. Weights that are meant, as by counts, make some
    larger and others smaller.
    """
    if not seen.is_common or seen.main_totals is None or not _weigh_the_same(seen):
        return None
    factors = seen.coefficients * seen.size
    if factors.min() <= 0.0:
        return None
    at_once: dict[int, list[int]] = {}
    for place, column in enumerate(seen.columns):
        at_once.setdefault(column.backward, []).append(place)
    lengths = _lengths(seen)
    clipped = [
        places
        for places in at_once.values()
        if _are_clipped(factors[places], lengths[places], seen.close)
    ]
    told = not are_equal(factors, seen.close) and _clipped_by_own_norms(seen)
    if not clipped and not told:
        return None
    clipped = clipped or list(at_once.values())
    by_rank = {seen.columns[place].rank: float(factors[place]) for place in clipped[0]}
    return seen.finding(
        BEFORE,
        f"the gradients{seen.of} were multiplied by {numbers(by_rank)} before they were "
        "averaged: each rank clipped, or scaled, its own",
        _FIX,
        evidence={"factors": factors.tolist()},
    )


def _weigh_the_same(seen: Seen) -> bool:
    """Do all losses weigh the same, or all their elements?"""
    assert seen.main_totals is not None
    terms = [main_term(backward) for backward in seen.backwards]
    counts = np.array([1.0 if term is None else term.count for term in terms])
    return are_equal(seen.main_totals) or are_equal(seen.main_totals / counts)


def _clipped_by_own_norms(seen: Seen) -> bool:
    """Did the ranks clip by norms that differ, of what they had added up by then?"""
    for at_once in zip(*(step.clips for step in seen.steps.values()), strict=False):
        is_clipped = any(clip.is_clipped for clip in at_once)
        if is_clipped and not are_equal(clip.norm for clip in at_once):
            return True
    return False


def _are_clipped(factors: Numbers, lengths: Numbers, close: float) -> bool:
    """Of the backwards that all ranks ran at once: have they factors that a clip gives them?"""
    if len(factors) < 2 or are_equal(factors, close):
        return False
    to_one_length = are_equal(factors * lengths, close) and not are_equal(lengths)
    return to_one_length or abs(float(factors.max()) - 1.0) <= close


def _lengths(seen: Seen) -> Numbers:
    """(K,): the norm of what each backward brought to these parameters."""
    found = []
    for column, backward in zip(seen.columns, seen.backwards, strict=True):
        norms = backward.local[seen.track.key].norms
        places = [shared.index[column.rank] for shared in seen.parameters]
        found.append(math.hypot(*np.nan_to_num(norms[places])))
    return np.array(found)


def cut_off_before(seen: Seen) -> Finding | None:
    """What was used is the mean of elements that each rank had cut off at one limit."""
    limit = None if seen.unexplained is None else limit_of(seen.unexplained)
    if limit is None:
        return None
    return seen.finding(
        BEFORE,
        f"each rank cut off the elements of its own gradients of {named(seen.names)} at "
        f"{limit:.6g} before they were averaged",
        _FIX,
        evidence={"limit": limit},
    )
