# SPDX-License-Identifier: Apache-2.0
"""Samples that do not count the same: means over different numbers of them, each of which does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.expectation import are_equal, counts_are_known, is_near, terms_of_one_kind
from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from lockstep.audit.diagnoses.seen import Seen
    from lockstep.audit.equations import Numbers
    from lockstep.audit.finding import Finding

UNEVEN: Final = Code("LS203", "a plain mean over unequal counts")

_SEVERE: Final = 1.2


def uneven(seen: Seen) -> Finding | None:
    """Counts differ, and what all of one mean's samples count together does not."""
    terms = terms_of_one_kind(seen.backwards) if seen.is_common else []
    if not terms or seen.main_totals is None:
        return None
    are_means = all(term.kind == "mean" for term in terms)
    if not are_means and not counts_are_known(seen.backwards):
        return None
    together = seen.coefficients * seen.main_totals
    counts = np.array([term.count for term in terms])
    weights = together / counts
    if are_equal(weights, seen.close):
        return None
    of_ranks, all_of_rank = seen.by_rank(counts), seen.by_rank(together)
    if are_means and are_equal(together, seen.close) and not are_equal(counts):
        places = [f"rank {c.rank}" for c in seen.columns]
        if seen.backwards_per_rank > 1:
            places = [f"rank {c.rank}, micro-batch {c.backward}" for c in seen.columns]
        said = dict(zip(places, counts.tolist(), strict=True))
        unit = "micro-batch" if are_equal(of_ranks.values()) else "rank"
    elif are_equal(all_of_rank.values(), seen.close) and not are_equal(of_ranks.values()):
        if not are_means and _is_of_ranks(seen):
            return None  # what its factor says is more
        said, unit = {f"rank {r}": n for r, n in of_ranks.items()}, "rank"
    else:
        return None
    # Images of other sizes, as many on each rank: they may be meant to count the same.
    images = {term.images for term in terms}
    count_alike = len(images) == 1 and None not in images
    ratio = float(weights.max() / weights.min())
    severity = "error" if ratio >= _SEVERE else "warning"
    if count_alike or (unit == "micro-batch" and _only_the_last_is_shorter(seen, counts)):
        severity = "notice"
    listed = ", ".join(f"{count:.0f} on {place}" for place, count in list(said.items())[:4])
    return seen.finding(
        UNEVEN,
        f"the loss is a mean over {listed}, and each {unit} counts the same: one element weighs "
        f"up to {ratio:.3g} times as much as another"
        f"{', though each image counts the same' if count_alike else ''}",
        "weigh every element the same: divide the sum of the losses by the number of elements on "
        "all ranks (and in all micro-batches of the step) and multiply by the number of ranks, or "
        "`gradients.backward(loss, weight=count)` of lockstep.replicate",
        severity=severity,
        evidence={"unit": unit, "counts": said, "weights": weights.tolist(), "op": terms[0].op},
        where=seen.backwards[0].where,
    )


def _only_the_last_is_shorter(seen: Seen, counts: Numbers) -> bool:
    """Does each rank have the same counts, equal but for a smaller last one?

    That is the rest of an epoch, which one process that accumulates weighs in the same way. Counts
    of tokens differ between ranks as well.
    """
    of_ranks: dict[int, list[float]] = {}
    for column, count in zip(seen.columns, counts.tolist(), strict=True):
        of_ranks.setdefault(column.rank, []).append(count)
    first, *others = of_ranks.values()
    *before, last = first
    return (
        all(other == first for other in others)
        and are_equal(before)
        and last < max(before, default=0.0)
    )


def _is_of_ranks(seen: Seen) -> bool:
    """Is each rank's loss multiplied by their number, or divided by it?"""
    assert seen.main_totals is not None
    total = next(iter(seen.by_rank(seen.main_totals).values()))
    return is_near(total, seen.size) or is_near(total, 1.0 / seen.size)
