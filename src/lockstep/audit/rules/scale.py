# SPDX-License-Identifier: Apache-2.0
"""Gradients that are too large or too small by the number of ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, Explained, first_found, first_of_each, named
from lockstep.audit.rules.words import divides_by_ranks, divides_rate, line_with_factor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.ledger import Collective, Step, Term
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

TWICE = Code("LS204", "gradients were reduced twice")
UNDIVIDED = Code("LS205", "what the ranks added up was not divided")
TIMES = Code("LS206", "the loss or its schedule is scaled by the number of ranks", "warning")

_CLOSE = 1e-4
_ONE_LOSS = 1e-6

_ALIGNED = 0.7
"""Of the lengths of replicas that have drifted apart, what is left when they are added up."""


class Sums:
    """All-reduces of gradients that Python called: were they equal before, divided after?"""

    codes = (TWICE, UNDIVIDED)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for track in world.compared:
            if track.key in explained.tracks:
                continue
            found = first_found(track, _judge_step)
            if found is not None:
                explained.sums.add(track.key)
                yield found


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    return _twice(track, number) or _undivided(track, number) or _models_undivided(track, number)


def reductions(step: Step) -> list[Collective]:
    return [
        c
        for c in step.collectives
        if c.op == "all_reduce"
        and c.reduction == "SUM"
        and c.parameter
        and c.before
        and c.after
        and len(c.group) > 1
    ]


def _twice(track: SharedTrack, number: int) -> Finding | None:
    """What is the same everywhere grows by exactly the number of ranks when it is added up."""
    steps = track.steps(number)
    calls = [reductions(step) for step in steps.values()]
    grown = [
        at_once
        for at_once in zip(*calls, strict=False)
        if all(is_near(c.after, len(c.group) * (c.before or 0.0)) for c in at_once)
        and len({c.parameter for c in at_once}) == 1
        and is_near(at_once[0].before, max(c.before or 0.0 for c in at_once))
    ]
    step = next(iter(steps.values()))
    kept = [at_once for at_once in grown if _was_kept(track, step, at_once[0])]
    if not kept or len(kept) < len(calls[0]) / 2:
        return None
    call = kept[0][0]
    names = sorted({str(at_once[0].parameter) for at_once in kept})
    return TWICE.finding(
        f"step {number + 1}: an all_reduce added up gradients that were already equal on all "
        f"ranks, which made {named(names)} {len(call.group)} times as large, and nothing divided "
        "it",
        "reduce once: leave out the all_reduce (the wrapper has averaged already), or do not wrap",
        rank=sorted(steps),
        step=number + 1,
        parameters=names,
        evidence={"before": call.before, "after": call.after, "ranks": len(call.group)},
        where=call.where,
    )


def is_near(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) <= _CLOSE * abs(wanted)


def _was_kept(track: SharedTrack, step: Step, call: Collective) -> bool:
    """Did the optimizer use it as large as the all_reduce left it?"""
    for shared in track.parameters:
        if shared.name == call.parameter and step.gradients is not None:
            rank = next(iter(shared.index))
            return is_near(float(step.gradients.norms[shared.index[rank]]), call.after or 0.0)
    return False


def _undivided(track: SharedTrack, number: int) -> Finding | None:
    """A sum over ranks of gradients of means; a loss that is a sum, or divided before, is fine."""
    steps = track.steps(number)
    if not all(map(is_one_mean, steps.values())) or is_made_up_for(track):
        return None
    size = len(steps)
    step = next(iter(steps.values()))
    calls = reductions(step)
    if not calls:
        return None
    kept = [c for c in calls if _was_kept(track, step, c) and len(c.group) == size]
    if len(kept) < len(calls) or (_wrapper_ran(step) and not _were_own(steps)):
        return None
    if not all(_was_as_backward_left_it(track, step, c) for c in kept):
        return None
    names = sorted({str(c.parameter) for c in kept})
    return UNDIVIDED.finding(
        f"step {number + 1}: each rank's loss is a mean over its own batch, the gradients of "
        f"{named(names)} were added up over {size} ranks and were not divided: they are {size} "
        "times those of the mean over all samples",
        "use op=ReduceOp.AVG, or divide by the world size after the all_reduce",
        rank=sorted(steps),
        step=number + 1,
        parameters=names,
        evidence={"after": kept[0].after, "ranks": size},
        where=kept[0].where,
    )


def _was_as_backward_left_it(track: SharedTrack, step: Step, call: Collective) -> bool:
    """Not divided on its way to the reduction; where backward left none, by the program's text."""
    left = step.backwards[-1].gradients.get(track.key) if step.backwards else None
    shared = next((s for s in track.parameters if s.name == call.parameter), None)
    if left is None or shared is None:
        return False
    rank = next(r for r, one in track.tracks.items() if step in one.steps)
    if call.in_backward or left.is_absent(shared.index[rank]):
        return not divides_by_ranks(call.where)
    return is_near(call.before, float(left.norms[shared.index[rank]]))


def _wrapper_ran(step: Step) -> bool:
    return any(b.wrappers for b in step.backwards if _ran(b.wrappers))


def _were_own(steps: dict[int, Step]) -> bool:
    """Was each rank's own gradient added up inside backward, before the wrapper averaged?"""
    calls = [[c for c in reductions(step) if c.in_backward] for step in steps.values()]
    return all(calls) and any(
        not is_near(other.before, first.before or 0.0)
        for first, *others in zip(*calls, strict=False)
        for other in others
        if other.parameter == first.parameter
    )


def _models_undivided(track: SharedTrack, number: int) -> Finding | None:
    """Replicas were added up as each rank's step had left them, and the sum was trained on."""
    steps, before = track.steps(number), track.steps(number - 1)
    if steps.keys() != before.keys():
        return None
    by_name: dict[str, dict[int, Collective]] = {}
    for rank, step in steps.items():
        for call in step.collectives:
            if call.weights and call.reduction == "SUM" and call.before and call.after:
                by_name.setdefault(call.weights, {})[rank] = call
    names = [name for name, calls in by_name.items() if _was_summed(track, number, name, calls)]
    if not names:
        return None
    call = next(iter(by_name[names[0]].values()))
    return UNDIVIDED.finding(
        f"between steps {number} and {number + 1} an all_reduce added up {named(names)} over "
        f"{len(call.group)} ranks, and nothing divided the sum: the model is about "
        f"{len(call.group)} times as large as each rank's",
        "use op=ReduceOp.AVG, or divide by the number of ranks after the all_reduce",
        rank=sorted(steps),
        step=number + 1,
        parameters=names,
        evidence={"before": call.before, "after": call.after, "ranks": len(call.group)},
        where=call.where,
    )


def _was_summed(track: SharedTrack, number: int, name: str, calls: dict[int, Collective]) -> bool:
    shared = next((s for s in track.parameters if s.name == name), None)
    if shared is None or calls.keys() != track.steps(number).keys():
        return False
    for rank, call in calls.items():
        left, found = track.steps(number - 1)[rank].exit, track.steps(number)[rank].entry
        if left is None or found is None:
            return False
        index = shared.index[rank]
        if not is_near(float(left.norms[index]), call.before or 0.0):
            return False  # it was weighed before
        if not is_near(float(found.norms[index]), call.after or 0.0):
            return False  # it was divided afterwards
    together = sum(call.before or 0.0 for call in calls.values())
    return all((call.after or 0.0) > _ALIGNED * together for call in calls.values())


def _ran(wrappers: dict[str, dict[str, object]]) -> bool:
    return any(f["armed"] for f in wrappers.values())


def is_one_mean(step: Step) -> bool:
    """Is the loss the mean over this rank's samples, and nothing else?"""
    ran = [b for b in step.backwards if b.kind == "backward"] or step.backwards
    terms = [b.terms for b in ran]
    if len(terms) != 1 or len(terms[0]) != 1 or terms[0][0].kind != "mean":
        return False
    return is_near(abs(terms[0][0].weight) * terms[0][0].count, 1.0)


def compute_one_loss(steps: Iterable[Step]) -> bool:
    """Ranks that share one loss have a part of its gradient each: the sum is the whole."""
    losses = [b.loss or 0.0 for step in steps for b in step.backwards]
    return max(losses) - min(losses) <= _ONE_LOSS * max(map(abs, losses))


def is_made_up_for(track: SharedTrack) -> bool:
    """Is the rate divided by the ranks, in an optimizer for which this is a mean again?"""
    first = next(iter(track.tracks.values()))
    decays = any(group.get("weight_decay") for step in first.steps[:1] for group in step.hyper)
    return first.optimizer == "SGD" and not decays and divides_rate(first.where)


class Factors:
    """A loss that counts W times or 1/W, by its graph and by the program's words."""

    codes = (TIMES,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        if world.sync_of_lockstep() or world.size < 2:
            return
        yield from first_of_each(world, explained, partial(_times, world))


def has_micro_batch_for_each_rank(steps: Iterable[Step], size: int) -> bool:
    """Then a factor that belongs to the one may be taken for the other's, and says nothing."""
    return any(sum(b.kind == "backward" for b in step.backwards) == size for step in steps)


def _is_over_chosen(track: SharedTrack, number: int) -> bool:
    """Sums over a part of the elements, by one count on all ranks: it may be that of all ranks."""
    terms = [t for s in track.steps(number).values() for b in s.backwards for t in b.terms]
    return len({t.count for t in terms}) == 1 and all(" of " in t.op for t in terms)


def _own_count(terms: list[Term]) -> float | None:
    """Of how many elements of its own a rank takes the mean, in one backward or in all of them.

    A loss knows how many there were; what was only added up may hold masked ones as well.
    """
    if all(t.kind == "mean" for t in terms):
        return terms[0].count
    if all(t.kind == "sum" and t.op != "sum" for t in terms):
        return sum(t.count for t in terms)
    return None


def _is_count_of_all(step: Step, count: float) -> bool:
    """Has the program added up over ranks what it divides by?"""
    sums = [c for c in step.collectives if (c.op, c.reduction) == ("all_reduce", "SUM")]
    return any(is_near(c.after, count) and not is_near(c.before, count) for c in sums)


def _times(world: World, track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    if _is_over_chosen(track, number) or has_micro_batch_for_each_rank(steps.values(), world.size):
        return None
    lines: list[Place] = []
    size = float(world.size)
    total = 0.0
    for step in steps.values():
        backwards = [b for b in step.backwards if b.kind == "backward"]
        if not backwards or any(len(b.terms) != 1 or b.gathered for b in backwards):
            return None
        divisor = _own_count([b.terms[0] for b in backwards])
        if divisor is None or _is_count_of_all(step, divisor):
            return None
        total = sum(abs(b.terms[0].weight) * b.terms[0].count for b in backwards)
        reduced = any(f["armed"] for f in backwards[-1].wrappers.values())
        if not reduced or not (is_near(total, size) or is_near(total, 1.0 / size)):
            return None
        lines = backwards[-1].where
    where = line_with_factor(lines, divides=total < 1.0)
    if where is None:
        return None
    how, ratio = (
        ("divided by", f"1/{world.size} of") if total < 1.0 else ("times", f"{size:g} times")
    )
    return TIMES.finding(
        f"step {number + 1}: the loss is a mean {how} {world.size}, the number of ranks (the line "
        "below), and the wrapper averages as well: gradients are "
        f"{ratio} those of the mean over all samples, and change with the number of ranks",
        "leave the factor out, unless the learning rate was chosen for it",
        rank=track.ranks,
        step=number + 1,
        evidence={"factor": total},
        where=[where, *lines],
    )
