# SPDX-License-Identifier: Apache-2.0
"""Clipping by a norm in which gradients were counted more than once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.audit.expectation import told
from lockstep.audit.rules.base import Code, at_step, each_step
from lockstep.audit.rules.left_by_backward import left_by

if TYPE_CHECKING:
    from lockstep.audit.facts import Collective, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack

TWICE = Code("LS210", "the gradients' norm was counted more than once")

_ADDED_UP = {("all_reduce", "SUM"), ("all_gather_object", None)}
"""Numbers that are gathered are added up by the program."""

_CLOSE = 1e-4
_APART = 0.01


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    left = {rank: _squares(left_by(step, track.key)) for rank, step in steps.items()}
    smaller = [rank for rank, step in steps.items() if _was_made_smaller(step, left[rank])]
    by_torch = any(clip.is_clipped for step in steps.values() for clip in step.clips)
    for rank in [] if by_torch else smaller:
        call = _counted(steps[rank], sum(left[rank]))
        if call is not None:  # the norm of gradients that all ranks share
            return _norm_twice(track, number, sum(left[rank]), call)
    if len(smaller) < len(track.ranks):
        return None
    twice = _of_the_whole_twice(track, number, left)
    return twice or (_replicas_counted(track, number, left) if track.apart else None)


NORMS = each_step((TWICE,), _judge_step)
"""Looks at what became of a norm that was reduced."""


def _norm_twice(track: SharedTrack, number: int, squared: float, call: Collective) -> Finding:
    size = len(call.group)
    return TWICE.finding(
        f"step {number + 1}: the squared norm of gradients that is already the same on all ranks "
        f"({squared:.6g}) was added up over {size} ranks, and the gradients were made smaller by "
        f"it: the norm is {size**0.5:.3g} times too large",
        "gradients that are reduced or put together have the global norm on every rank: do not "
        "reduce it",
        evidence={"squared_norm": squared, "reduced": call.after, "ranks": size},
        **at_step(track, number, where=call.where),
    )


def _of_the_whole_twice(
    track: SharedTrack, number: int, left: dict[int, list[float]]
) -> Finding | None:
    """The norm of sharded gradients, put together on every rank, and then added up over ranks."""
    if not all(p.sharded for of_rank in track.tracks.values() for p in of_rank.parameters):
        return None
    squared = sum(map(sum, left.values()))
    calls = [_counted(step, squared) for step in track.steps(number).values()]
    call = calls[0]
    return None if call is None or None in calls else _norm_twice(track, number, squared, call)


def _replicas_counted(
    track: SharedTrack, number: int, left: dict[int, list[float]]
) -> Finding | None:
    """A norm over pieces, to which every rank has added what all of them have whole."""
    steps = track.steps(number)
    whole = {shared.name for shared in track.parameters}
    whole -= {d.name for d in track.differences("gradients", number)}
    if not whole:
        return None
    calls = [_added_up(step, sum(left[rank])) for rank, step in steps.items()]
    call = calls[0]
    if call is None or None in calls:
        return None
    total = sum(map(sum, left.values()))
    rank = track.ranks[0]
    of_first = zip(track.tracks[rank].parameters, left[rank], strict=True)
    again = sum(square for described, square in of_first if described.name in whole)
    if abs((call.after or 0.0) - total) > _CLOSE * total or again < _APART * total:
        return None
    return TWICE.finding(
        f"step {number + 1}: the squared norms of all ranks' gradients were added up, of pieces "
        f"and of {len(whole)} parameters that every rank has whole: these counted {len(steps)} "
        "times, and the gradients were made smaller by it",
        "add up the squares of each rank's own pieces, and those of what all have whole once",
        parameters=sorted(whole),
        evidence={"reduced": call.after, "whole": again, "ranks": len(steps)},
        **at_step(track, number, where=call.where),
    )


def _squares(gradients: Fingerprint | None) -> list[float]:
    norms = () if gradients is None else map(float, gradients.norms)
    return [norm * norm if norm == norm else 0.0 for norm in norms]


def _was_made_smaller(step: Step, left: list[float]) -> bool:
    used, before = step.gradients, sum(left)
    # What is infinite is close to any number.
    return used is not None and sum(_squares(used)) < (1.0 - _CLOSE) * before < math.inf


def _added_up(step: Step, squared: float) -> Collective | None:
    """The call that was given this number, and gave back what all ranks gave together."""
    near = (c for c, given, _ in told(step, _ADDED_UP) if abs(given - squared) <= _CLOSE * squared)
    return next(near, None)


def _counted(step: Step, squared: float) -> Collective | None:
    call = _added_up(step, squared)
    if call is None or call.after is None:
        return None
    size = len(call.group)
    return call if abs(call.after - size * squared) <= _CLOSE * call.after else None
