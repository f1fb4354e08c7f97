# SPDX-License-Identifier: Apache-2.0
"""Verdicts that are read off mixings: each diagnosis is a predicate, a code and its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lockstep.audit.diagnoses import clipping, micro_batches, ranks, scale, weights
from lockstep.audit.diagnoses.seen import Seen, seen_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.rules.base import Code
    from lockstep.audit.shared_track import SharedTrack

Diagnosis = Callable[[Seen], "Finding | None"]

DIAGNOSES: Final[tuple[Diagnosis, ...]] = (
    ranks.of_one_rank,
    micro_batches.of_the_last_alone,
    ranks.scaled_apart,
    weights.uneven,
    scale.summed_each_time,
    clipping.scaled_before,
    clipping.cut_off_before,
    scale.reduced_again,
    scale.undivided,
    scale.times_ranks,
    scale.divided_by_all,
)
"""In the order in which they are asked: the first that knows an answer gives it."""

CODES: Final[tuple[Code, ...]] = (
    ranks.DIFFER,
    ranks.ONE_RANK,
    micro_batches.CLEARED,
    weights.UNEVEN,
    scale.TWICE,
    scale.UNDIVIDED,
    scale.TIMES,
    clipping.BEFORE,
)


def diagnose(track: SharedTrack, asked: Sequence[Diagnosis]) -> Iterator[Finding]:
    """What is wrong with the gradients of an optimizer, step by step.

    Args:
        asked: which diagnoses; where a mixing is assumed, at most whether samples weigh the same.
    """
    known: Seen | None = None
    for number in track.numbers_of(track.ranks[0]):
        found = list(seen_in(track, number, known))
        known = next((seen for seen in found if seen.is_whole and seen.is_common), known)
        for seen in found:
            fitting = (one for one in asked if one is weights.uneven or not seen.is_assumed)
            answers = (diagnosis(seen) for diagnosis in fitting)
            yield from [answer for answer in answers if answer is not None][:1]
