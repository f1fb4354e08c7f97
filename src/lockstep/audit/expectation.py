# SPDX-License-Identifier: Apache-2.0
"""What one sample counts in the loss of a backward, as its graph says.

The gradient of the mean over a global batch gives every sample the same weight. What a sample
counts in the end is its weight in the loss, times the coefficient with which that backward's
gradient went into the step (`lockstep.audit.mixing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from lockstep.audit.facts import Backward, Collective, Step, Term

APART: Final = 1e-3
"""Numbers that are nearer to each other than this may be the same ones."""
_CLOSE: Final = 1e-4
COMPUTED_ALIKE: Final = 1e-6
"""Numbers that ranks computed from the same ones are nearer to each other than this."""


def is_near(value: float | None, wanted: float) -> bool:
    """But for what arithmetic in single precision loses."""
    return value is not None and abs(value - wanted) <= _CLOSE * abs(wanted)


def are_equal(values: Iterable[float], close: float = APART) -> bool:
    """But for what arithmetic in single precision loses, or for `close` of the largest."""
    numbers = np.array(list(values))
    largest, smallest = float(numbers.max()), float(numbers.min())
    return largest - smallest <= close * max(abs(largest), abs(smallest))


def total_weight(backward: Backward) -> float | None:
    """What all samples of a loss count together: 1 for a mean; None if its graph does not tell.

    Of a loss of several terms nobody knows whether they are about the same samples.
    """
    return main_weight(backward) if len(backward.terms) == 1 else None


def main_weight(backward: Backward) -> float | None:
    """As `total_weight`, of the term that counts most beside penalties, if all are means.

    What a program adds to its loss, and by which factor, is its own choice.
    """
    term = main_term(backward)
    return None if term is None else _counts(term)


def main_term(backward: Backward) -> Term | None:
    """The term of a loss that counts most; None if its graph does not tell."""
    terms = [term for term in backward.terms if term.count > 0]
    are_means = all(term.kind == "mean" for term in terms)
    if not terms or len(terms) < len(backward.terms) or not (are_means or len(terms) == 1):
        return None
    return max(terms, key=_counts)


def counts_are_known(backwards: Sequence[Backward]) -> bool:
    """Is it known of how many elements each loss is?

    In a sum that is divided by hand some may not count; the divisor tells, unless it is the same
    for all: then it may be a count of all ranks.
    """
    terms = [term for backward in backwards for term in backward.terms]
    masked = any(term.may_be_masked for term in terms)
    return not masked or len({term.count for term in terms}) > 1


def is_one_mean(step: Step) -> bool:
    """Is the loss of a step the mean over this rank's samples, and nothing else?"""
    ran = [b for b in step.backwards if b.kind == "backward"] or step.backwards
    if len(ran) != 1 or len(ran[0].terms) != 1 or ran[0].terms[0].kind != "mean":
        return False
    return is_near(total_weight(ran[0]), 1.0)


def share_one_loss(backwards: Iterable[Backward]) -> bool:
    """Ranks that share one loss have a part of its gradient each: the sum is the whole.

    Losses of ranks that begin with one model are nearly alike, and are no shared one.
    """
    return are_equal((backward.loss or 0.0 for backward in backwards), COMPUTED_ALIKE)


def told(
    step: Step, operations: Container[tuple[str, str | None]]
) -> Iterator[tuple[Collective, float, float]]:
    """Calls by which ranks told one another a number; what a rank gave, and what came of it.

    Args:
        operations: which count, with their reductions.
    """
    for call in step.collectives:
        counts = (call.op, call.reduction) in operations and len(call.group) > 1
        if not counts or call.parameter is not None:
            continue
        if call.before is not None and call.after is not None:
            yield call, call.before, call.after


def terms_of_one_kind(backwards: Sequence[Backward]) -> list[Term]:
    """The term that stands for each of these losses; none if they are not of one kind.

    They are if they consist of the same operations, by the same head of the model. Backwards of
    other lines are of other losses, each a mean of its own: of new samples and of those that are
    rehearsed, say.
    """
    kinds = [([term.op for term in b.terms], b.heads, b.where) for b in backwards]
    mains = [term for b in backwards if (term := main_term(b)) is not None]
    if len(mains) < len(backwards) or any(kind != kinds[0] for kind in kinds):
        return []
    at_once = zip(*(b.terms for b in backwards), strict=True)
    return mains if all(_goes_along(terms, mains) for terms in at_once) else []


def _goes_along(terms: Sequence[Term], mains: Sequence[Term]) -> bool:
    """Can `mains` stand for losses of which `terms` are a part?

    As many elements have both, as with label smoothing. Or, as with a penalty, all of `terms` are
    of the same number, and each counts less than the main one.
    """
    pairs = list(zip(terms, mains, strict=True))
    if all(term.count == main.count for term, main in pairs):
        return True
    count = terms[0].count
    return all(
        term.count == count and _counts(term) < (1.0 - APART) * _counts(main)
        for term, main in pairs
    )


def _counts(term: Term) -> float:
    """What all elements of a term count together."""
    return abs(term.weight) * term.count
