# SPDX-License-Identifier: Apache-2.0
"""Gradients that are too large or too small by the number of ranks.

A factor alone is ambiguous: a loss may be meant to count twice. So a verdict needs a second number
that says the same: a sum that nothing divided, an average that was reduced once more, a count that
the ranks told one another.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.expectation import (
    are_equal,
    counts_are_known,
    is_near,
    share_one_loss,
    told,
    total_weight,
)
from lockstep.audit.program_text.rank_factors import divides_rate
from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from lockstep.audit.diagnoses.seen import Seen
    from lockstep.audit.equations import Numbers
    from lockstep.audit.facts import Collective, Step
    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.shared_track import SharedTrack

TWICE: Final = Code("LS204", "gradients were reduced twice")
UNDIVIDED: Final = Code("LS205", "what the ranks added up was not divided")
TIMES: Final = Code("LS206", "the loss or its schedule is scaled by the number of ranks", "warning")

_FEWEST_COUNTS: Final = 2
"""Different ones in different steps: a batch size may be the same number by chance."""
_TELLING: Final = {("all_reduce", "SUM"), ("all_gather", None), ("all_gather_into_tensor", None)}


def summed_each_time(seen: Seen) -> Finding | None:
    """Of equal losses an earlier one counts N times as much as the next: it was summed again."""
    seen = seen.without_inner_gradients()
    if not seen.is_common or seen.main_totals is None or not are_equal(seen.main_totals):
        return None
    for rank in seen.ranks:
        own = [c for c, x in zip(seen.coefficients, seen.columns, strict=True) if x.rank == rank]
        ratios = [earlier / later for earlier, later in itertools.pairwise(own)]
        if not ratios or not all(is_near(ratio, seen.size) for ratio in ratios):
            return None
    return seen.finding(
        TWICE,
        f"the gradients{seen.of} were added up over {seen.size} ranks after each backward, and not "
        "divided in between: what an earlier micro-batch left is part of each later sum, and "
        f"counts {seen.size} times as much as the next one's",
        "reduce once, after the last micro-batch of the step, or use op=ReduceOp.AVG each time",
    )


def reduced_again(seen: Seen) -> Finding | None:
    """What was the same on all ranks was added up, or divided by their number, once more."""
    if not _weighs_all_the_same(seen):
        return None
    size = seen.size
    again = 1.0 / size if seen.is_coefficient(1.0 / size**2) else _changed_again(seen)
    if again is None or not _is_wrong(seen, again):
        return None
    what = "added up, or multiplied by it," if again > 1.0 else "divided by it"
    return seen.finding(
        TWICE,
        f"the gradients{seen.of} were averaged over {size} ranks, and {what} once more: they are "
        f"{_said(seen, again)} what the average gives",
        "reduce once: what the first reduction leaves is the average over all ranks already",
        # On two ranks gradients that a program halves, or doubles, itself look the same.
        severity="notice" if size == 2 and not (again > 1.0 and _reduces_by_hand(seen)) else None,
        evidence={"ratio": again},
    )


def _reduces_by_hand(seen: Seen) -> bool:
    """Did the program itself reduce these gradients, or as many elements, outside of a backward?"""
    rank, step = next(iter(seen.steps.items()))
    calls = [
        call
        for call in step.collectives
        if call.op != "broadcast" and not (call.in_backward or call.weights)
    ]
    if any(call.parameter in seen.names for call in calls):
        return True
    held = sum(math.prod(shared.described[rank].shape) for shared in seen.parameters)
    return sum(math.prod(call.shape) for call in calls if call.parameter is None) >= held


def undivided(seen: Seen) -> Finding | None:
    """Each rank's loss counts as if it were alone, and the sum of their gradients was used."""
    if not _weighs_all_the_same(seen) or not seen.is_coefficient(1.0):
        return None
    size, each = seen.size, seen.backwards_per_rank
    weight = _weight_of_all(seen)
    is_sum = seen.is_near(weight, size) or (each != size and seen.is_near(weight, size * each))
    if not is_sum or share_one_loss(seen.backwards):
        return None
    return seen.finding(
        UNDIVIDED,
        f"each rank's loss is a mean over its own batch, and the optimizer used the sum of the "
        f"{size} ranks' gradients{seen.of}: {_said(seen, size)} those of the mean over all samples",
        "use op=ReduceOp.AVG, or divide by the world size after the reduction",
        severity="notice" if rate_is_divided(seen.track) else None,
        evidence={"ranks": size, "ratio": float(size)},
    )


def rate_is_divided(track: SharedTrack) -> bool:
    """Does the program's text divide the learning rate by the ranks? Then a sum may be meant.

    The one place where text has a say: no number tells which rate was meant. Only of SGD, for which
    a rate makes up for a factor, and where weights do not decay.
    """
    first = track.first
    decays = any(group.get("weight_decay") for step in first.steps[:1] for group in step.hyper)
    return first.optimizer == "SGD" and not decays and divides_rate(first.where)


def times_ranks(seen: Seen) -> Finding | None:
    """An average of losses that were divided by the number of ranks, or multiplied with it."""
    size = seen.size
    if not seen.is_common or seen.communicates or not seen.is_coefficient(1.0 / size):
        return None
    counts = _told_counts(seen)
    if counts is not None:
        by_rank = seen.by_rank(sum(t.count for t in b.terms) for b in seen.backwards)
        return seen.finding(
            TIMES,
            f"each rank's loss is its share of a mean over all ranks' {counts:g} elements, and "
            f"the gradients were averaged as well: they are {_said(seen, 1.0 / size)} those of the "
            "mean over all samples",
            f"multiply the loss by the number of ranks, which the average divides by: {size} here",
            # Where two ranks have as many, a loss that counts half looks the same.
            severity="notice" if size == 2 and are_equal(by_rank.values()) else None,
            evidence={"ratio": 1.0 / size, "counts": counts},
        )
    if seen.totals is None or seen.backwards_per_rank == size:
        return None  # a factor that is the number of micro-batches may be meant
    if not counts_are_known(seen.backwards):
        return None
    total = float(np.mean(list(seen.by_rank(seen.totals).values())))
    if not are_equal(seen.by_rank(seen.totals).values()):
        return None
    if not is_near(total, 1.0 / size) and not is_near(total, size):
        return None
    steps = (step for of_rank in seen.track.tracks.values() for step in of_rank.steps)
    if not all(_is_factor(seen, step, total) for step in steps):
        return None  # a short window at the end, say
    return seen.finding(
        TIMES,
        f"each rank's loss is {total:.6g} times a mean, and the gradients were averaged: they are "
        f"{_said(seen, total)} those of the mean over all samples, and change with the number of "
        "ranks if the factor does",
        "leave the factor out, unless the learning rate was chosen for it",
        # On two ranks a loss that counts half, or twice, is common.
        severity="notice" if size == 2 else None,
        evidence={"ratio": total},
    )


def divided_by_all(seen: Seen) -> Finding | None:
    """A part of a loss is a share of the mean over all ranks, and was averaged as well.

    Beside others that are means over a rank's own elements. (Of a loss of one part `times_ranks`
    tells.) What the part was divided by is a count that the ranks have added up, in each step
    another one: nothing else is so by chance.
    """
    size = seen.size
    if not seen.is_common or seen.communicates or not seen.is_coefficient(1.0 / size):
        return None
    of_step = _divisors_of_all(seen.steps, size)
    if not of_step:
        return None
    counts = [_divisors_of_all(steps, size) for steps in _detailed(seen.track)]
    if not all(counts) or len({min(of_other) for of_other in counts}) < _FEWEST_COUNTS:
        return None
    count, where = next(iter(of_step.items()))
    return seen.finding(
        TIMES,
        f"a part of each rank's loss was divided by the {count:g} elements that all {size} ranks "
        f"have together, and the gradients were averaged as well: it counts 1/{size} of what it "
        "counts in the mean over all samples",
        f"divide by the ranks' average, which is that number over {size}, or multiply this part of "
        "the loss by the number of ranks",
        where=[*where, *seen.lines],
        evidence={"ratio": 1.0 / size, "counts": count},
    )


def _detailed(track: SharedTrack) -> list[dict[int, Step]]:
    """The steps whose collectives were written down on all ranks."""
    found = map(track.steps, track.numbers)
    return [steps for steps in found if all(step.collectives for step in steps.values())]


def _divisors_of_all(steps: dict[int, Step], size: int) -> dict[float, list[Place]]:
    """By what a part of the loss was divided on each rank, and where the ranks had added it up.

    Not where a factor may be the number of ranks, which makes up for it.
    """
    of_ranks: list[dict[float, list[Place]]] = []
    for step in steps.values():
        counts = {
            of_all: call.where
            for call, own, of_all in told(step, _TELLING)
            if math.prod(call.shape) == 1 and len(call.group) == size
            if own.is_integer() and 0.0 != own < of_all != 0.0
        }
        of_ranks.append(
            {
                by: counts[by]
                for backward in step.backwards
                for term in backward.terms
                if not any(factor % size == 0.0 for factor in term.factors)
                for by in term.divisors
                if by in counts
            }
        )
    first, *others = of_ranks
    return {by: where for by, where in first.items() if all(by in other for other in others)}


def _is_factor(seen: Seen, step: Step, total: float) -> bool:
    """Do the losses of a step count together as much, and are they no others?"""
    ran = [b for b in step.backwards if b.kind == "backward" and seen.track.key in b.touched]
    known = [t for b in ran if (t := total_weight(b)) is not None]
    return len(known) == len(ran) and (not ran or is_near(sum(known), total))


def _weighs_all_the_same(seen: Seen) -> bool:
    known = seen.is_common and seen.main_totals is not None and not seen.communicates
    return known and are_equal(seen.coefficients, seen.close)


def _weight_of_all(seen: Seen) -> float | None:
    """What all samples of all ranks count in the step together: 1 in the mean over all of them.

    Times the number of micro-batches, where their means are added up. None where nobody knows of
    how many elements a loss is.
    """
    if seen.main_totals is None or not counts_are_known(seen.backwards):
        return None
    return float(seen.coefficients @ seen.main_totals)


def _is_wrong(seen: Seen, ratio: float) -> bool:
    """A sum that all ranks divide by a count of their own may be reduced so, and be right."""
    weight, each = _weight_of_all(seen), seen.backwards_per_rank
    if weight is None or seen.is_near(weight, 1.0):
        return False
    return ratio > 1.0 or each != seen.size


def _changed_again(seen: Seen) -> float | None:
    """By what gradients that were equal on all ranks have grown: N, 1/N, or None for all else."""
    left: list[Numbers] = []
    hashes = set()
    for rank, step in seen.steps.items():
        after = step.backwards[-1].gradients.get(seen.track.key)
        places = [shared.index[rank] for shared in seen.parameters]
        if after is None or step.gradients is None or not np.nan_to_num(after.norms[places]).any():
            return _grown_by_a_sum(seen)
        with np.errstate(divide="ignore", invalid="ignore"):  # of gradients that are zero
            left.append(seen.used_norms(rank)[places] / after.norms[places])
        hashes.add(tuple(after.hashes[places].tolist()))
    ratios = np.concatenate(left)
    ratios = ratios[np.isfinite(ratios)]
    if len(hashes) > 1 or not len(ratios) or not are_equal(ratios):
        return _grown_by_a_sum(seen)
    return next((r for r in (float(seen.size), 1.0 / seen.size) if is_near(ratios.mean(), r)), None)


def _grown_by_a_sum(seen: Seen) -> float | None:
    """N, if an all_reduce was given the same by all ranks, and what it left was used.

    Or if it was one more than other parameters went through: a tensor with two names, say.
    """
    calls: dict[str, list[Collective]] = {}
    for step in seen.steps.values():
        for call in step.collectives:
            if call.op == "all_reduce" and call.parameter and len(call.group) == seen.size:
                calls.setdefault(call.parameter, []).append(call)
    own = [calls.get(name, []) for name in seen.names]
    if not own or not all(own):
        return None
    others = [len(of_name) for name, of_name in calls.items() if name not in seen.names]
    if others and min(map(len, own)) > max(others):
        return float(seen.size)
    last = [of_name[-seen.size :] for of_name in own]
    grown = all(
        are_equal(c.before or 0.0 for c in at_once)
        and all(is_near(c.after, seen.size * (c.before or 0.0)) for c in at_once)
        for at_once in last
    )
    return float(seen.size) if grown else None


def _told_counts(seen: Seen) -> float | None:
    """How many elements all ranks have, if they told one another and each element counts as one.

    Told in the step, by a sum over ranks or a gather.
    """
    if any(len(backward.terms) == 0 for backward in seen.backwards):
        return None
    # Beside the loss there may be others of the same elements, which count less.
    terms = [max(b.terms, key=lambda t: abs(t.weight)) for b in seen.backwards]
    if seen.backwards_per_rank == seen.size and len({t.count for t in terms}) == 1:
        return None  # what all ranks have in one of them is what each has in all of them
    step = next(iter(seen.steps.values()))
    for _, own, of_all in told(step, _TELLING):
        if not own or is_near(own, of_all) or of_all <= 1.0:
            continue
        if all(is_near(abs(t.weight), 1.0 / of_all) for t in terms):
            return of_all
    return None


def _said(seen: Seen, ratio: float) -> str:
    """``2 times``, ``0.5 of``, and how far off it may be."""
    assert seen.mixing is not None
    error = float(seen.mixing.errors.max()) * seen.size
    word = "times" if ratio >= 1.0 else "of"
    return f"{ratio:.6g} (± {max(error, 1e-7):.0e}) {word}"
