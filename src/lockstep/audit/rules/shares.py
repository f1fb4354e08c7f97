# SPDX-License-Identifier: Apache-2.0
"""Losses weighed by a rank's share of all elements, where the wrapper averages as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Explained, first_of_each, numbers
from lockstep.audit.rules.left_by_backward import uses_what_backward_left
from lockstep.audit.rules.scale import TIMES, has_micro_batch_for_each_rank, is_near

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Collective, Step, Term
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


_TELLING = {("all_reduce", "SUM"), ("all_gather", None), ("all_gather_into_tensor", None)}


class Shares:
    """A sum over the counted elements of all ranks, of which an average is made."""

    codes = (TIMES,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        if not world.sync_of_lockstep():
            yield from first_of_each(world, explained, _judge_twice)


def _judge_twice(track: SharedTrack, number: int) -> Finding | None:
    """Numbers that are equal once may be so by chance."""
    later = [n for n in track.numbers if n > number]
    found = _judge_step(track, number)
    again = not later or any(_judge_step(track, n) is not None for n in later)
    return found if again else None


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    if len(steps) < 2 or len(steps) < len(track.ranks):
        return None
    if not all(_is_averaged(track, rank, step) for rank, step in steps.items()):
        return None
    calls = {rank: _counted(step) for rank, step in steps.items()}
    if not all(_uses_the_average(step, track.key) for step in steps.values()):
        return None
    counts = {rank: call.before for rank, call in calls.items() if call and call.before}
    if len(counts) < len(steps):
        return None
    step, size = next(iter(steps.values())), len(steps)
    if len(set(counts.values())) == 1 and has_micro_batch_for_each_rank(steps.values(), size):
        return None  # what all have in one of them is what each has in all of them
    call = next(call for call in calls.values() if call)
    return TIMES.finding(
        f"step {number + 1}: each rank's loss is its share of a mean over all ranks' "
        f"{call.after:g} elements ({numbers(counts)} of them are its own), and {_who(step)} "
        f"divides by {size} as well: gradients are 1/{size} of those of the mean over all samples",
        f"multiply the loss by the number of ranks, which {_who(step)} divides by: {size} here",
        rank=track.ranks,
        step=number + 1,
        evidence={"ratio": 1.0 / size, "counts": {str(r): n for r, n in counts.items()}},
        where=[*step.backwards[-1].where, *call.where],
    )


def _is_averaged(track: SharedTrack, rank: int, step: Step) -> bool:
    """By a wrapper, or by ``fully_shard``, which was not told to divide by another number."""
    if any(b.wrappers for b in step.backwards):
        return any(f["armed"] for b in step.backwards for f in b.wrappers.values())
    return not step.divided and all(p.sharded for p in track.tracks[rank].parameters)


def _who(step: Step) -> str:
    return "the wrapper" if any(b.wrappers for b in step.backwards) else "`fully_shard`"


def _counted(step: Step) -> Collective | None:
    """What told the ranks how many elements there are, by which the losses were divided.

    Of one step: those of all its micro-batches together.
    """
    backwards = [b for b in step.backwards if b.kind == "backward"]
    if not backwards or any(not b.terms or b.gathered for b in backwards):
        return None
    # Beside the loss there may be others of the same elements, which count less.
    terms = [max(b.terms, key=lambda term: abs(term.weight)) for b in backwards]
    if any(t.kind not in ("mean", "sum") for t in terms):
        return None
    for call in step.collectives:
        if (call.op, call.reduction) in _TELLING and len(call.group) > 1 and _divided(call, terms):
            return call
    return None


def _divided(call: Collective, terms: Sequence[Term]) -> bool:
    """Does every element count as one of all that the ranks have told of?

    A mean was weighed by the rank's share; a sum was divided by how many there are, also where its
    elements are masked and only the program knows how many count.
    """
    if not call.before or not call.after or call.parameter or is_near(call.before, call.after):
        return False
    # What is divided by the number of its own elements is a mean, of as many on each rank.
    if all(t.kind == "sum" or " of " in t.op for t in terms) and all(
        is_near(abs(t.weight), 1.0 / call.after) for t in terms
    ):
        return call.after > 1.0
    share = sum(abs(t.weight) * t.count for t in terms)
    counts = is_near(call.before, sum(t.count for t in terms))
    return counts and is_near(share, call.before / call.after)


def _uses_the_average(step: Step, key: str) -> bool:
    """Neither a hook of the wrapper's nor the program has made up for it."""
    hooked = step.backwards and step.backwards[-1].own
    return not hooked and uses_what_backward_left(step, key)
