# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks that are added up over ranks once more.

What the ranks have added up is the same on all of them. In a second sum it counts as often as there
are ranks, whatever it is divided by in the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.rules.base import Code, Explained, first_found, named
from lockstep.audit.rules.scale import TWICE, is_near, reductions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Backward, Collective, Step
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


class Again:
    """Parameters that were reduced more often than others, and sums that backward added to."""

    codes: tuple[Code, ...] = (TWICE,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for track in world.compared:
            if track.key in explained.tracks | explained.sums:
                continue
            found = first_found(track, _again)
            if found is not None:
                explained.sums.add(track.key)
                yield found


def _again(track: SharedTrack, number: int) -> Finding | None:
    return _more_often_than_others(track, number) or _each_backward(track, number)


def _by_name(step: Step) -> dict[str, list[Collective]]:
    found: dict[str, list[Collective]] = {}
    for call in reductions(step):
        found.setdefault(str(call.parameter), []).append(call)
    return found


def _more_often_than_others(track: SharedTrack, number: int) -> Finding | None:
    """A tensor with two names, say: reduced once for each, and divided once."""
    rank, step = next(iter(track.steps(number).items()))
    calls = _by_name(step)
    once = {_kept(track, rank, step, c[0]) for c in calls.values() if len(c) == 1}
    if len(once) != 1 or None in once:
        return None
    again = [
        name
        for name, (first, *others) in calls.items()
        if others and _adds_up(others[0], first) and {_kept(track, rank, step, others[-1])} == once
    ]
    if not again:
        return None
    call = calls[again[0]][-1]
    return TWICE.finding(
        f"step {number + 1}: {named(again)} went through {len(calls[again[0]])} all_reduces that "
        "add up, the other gradients through one, and all are divided by the same: "
        f"{len(call.group)} times too large",
        "reduce each gradient once: `model.parameters()` names a tensor that is tied once, "
        "`named_parameters(remove_duplicate=False)` does not",
        rank=track.ranks,
        step=number + 1,
        parameters=again,
        evidence={"before": call.before, "after": call.after, "ranks": len(call.group)},
        where=call.where,
    )


def _adds_up(second: Collective, first: Collective) -> bool:
    """Was what the first left, the same on all ranks, added up by the second?"""
    left = first.after or 0.0
    return is_near(second.before, left) and is_near(second.after, len(second.group) * left)


def _kept(track: SharedTrack, rank: int, step: Step, call: Collective) -> float | None:
    """Which part of what `call` left the optimizer used, to three digits."""
    for shared in track.parameters:
        held = shared.name == call.parameter and rank in shared.index
        if held and step.gradients is not None and call.after:
            used = float(step.gradients.norms[shared.index[rank]])
            return float(f"{used / call.after:.3g}")
    return None


def _each_backward(track: SharedTrack, number: int) -> Finding | None:
    """Sums over ranks to which the next micro-batch's gradients are added, and all added up."""
    rank, step = next(iter(track.steps(number).items()))
    backwards = [b for b in step.backwards if b.kind == "backward"]
    if len(backwards) < 2 or any(
        track.key not in b.before or track.key not in b.gradients for b in backwards
    ):
        return None
    again, calls = _each_parameter(track, rank, step, backwards)
    what = named(again)
    if not again:
        calls = _all_together(track, rank, step, backwards)
        what = "all gradients together"
    if not calls:
        return None
    size = len(calls[-1].group)
    return TWICE.finding(
        f"step {number + 1}: {what} were added up over {size} ranks after each of "
        f"{len(backwards)} backwards, and not divided in between: what an earlier micro-batch left "
        f"is part of each later sum, and counts {size} times as much as the next one's",
        "reduce once, after the last micro-batch of the step, or use op=ReduceOp.AVG each time",
        rank=track.ranks,
        step=number + 1,
        parameters=again,
        evidence={"after": calls[0].after, "ranks": size, "backwards": len(backwards)},
        where=calls[-1].where,
    )


def _each_parameter(
    track: SharedTrack, rank: int, step: Step, backwards: list[Backward]
) -> tuple[list[str], list[Collective]]:
    calls = {n: c for n, c in _by_name(step).items() if len(c) == len(backwards)}
    places = {
        shared.name: shared.index[rank] for shared in track.parameters if rank in shared.index
    }
    again = [
        name
        for name, of_name in calls.items()
        if name in places
        and _went_on_with_sums(
            [c.before or 0.0 for c in of_name],
            [c.after or 0.0 for c in of_name],
            [float(b.gradients[track.key].norms[places[name]]) for b in backwards],
            [float(b.before[track.key].norms[places[name]]) for b in backwards],
        )
    ]
    return again, calls[again[0]] if again else []


def _went_on_with_sums(
    given: list[float], summed: list[float], left: list[float], found: list[float]
) -> bool:
    """Did each backward but the first begin with the sum of what the one before had left?

    By norms: what the reductions were given and made of it, what backwards left, and found.
    Gradients that are divided before they are added up stay what they are in the next sum.
    """
    return all(map(is_near, given, left)) and all(map(is_near, found[1:], summed))


def _all_together(
    track: SharedTrack, rank: int, step: Step, backwards: list[Backward]
) -> list[Collective]:
    """The same of copies, as one flat tensor or several: as many elements as all gradients have."""
    given = backwards[-1].gradients[track.key]
    sizes = [
        math.prod(p.shape)
        for place, p in enumerate(track.tracks[rank].parameters)
        if not given.is_absent(place)
    ]
    calls = [
        c
        for c in step.collectives
        if (c.op, c.reduction) == ("all_reduce", "SUM")
        and not (c.parameter or c.weights or c.in_backward)
        and math.prod(c.shape) > 1
        and len(c.group) > 1
    ]
    each, rest = divmod(len(calls), len(backwards))
    parts = [calls[i * each : (i + 1) * each] for i in range(len(backwards))]
    if rest or any(sum(math.prod(c.shape) for c in part) != sum(sizes) for part in parts):
        return []
    went_on = _went_on_with_sums(
        [math.hypot(*(c.before or 0.0 for c in part)) for part in parts],
        [math.hypot(*(c.after or 0.0 for c in part)) for part in parts],
        [_length(b.gradients[track.key]) for b in backwards],
        [_length(b.before[track.key]) for b in backwards],
    )
    return calls if went_on else []


def _length(of_all: Fingerprint) -> float:
    return float(np.sqrt(np.nansum(np.square(of_all.norms))))
