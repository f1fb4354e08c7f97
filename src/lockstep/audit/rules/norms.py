# SPDX-License-Identifier: Apache-2.0
"""Clipping by a norm in which gradients were counted more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.rules.base import Code, at_step, first_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Collective, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

TWICE = Code("LS210", "the gradients' norm was counted more than once")

_ADDED_UP = {("all_reduce", "SUM"), ("all_gather_object", None)}
"""Numbers that are gathered are added up by the program."""

_CLOSE = 1e-4
_APART = 0.01


class Norms:
    """Looks at what became of a norm that was reduced."""

    codes = (TWICE,)

    def judge(self, world: World) -> Iterable[Finding]:
        return first_of_each(world.compared, _judge_step)


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    return (
        _twice(track, number)
        or _of_the_whole_twice(track, number)
        or _replicas_counted(track, number)
    )


def _twice(track: SharedTrack, number: int) -> Finding | None:
    """The norm of gradients that all ranks share, added up over ranks, and then clipped by."""
    steps = track.steps(number)
    if any(clip.is_clipped for step in steps.values() for clip in step.clips):
        return None  # by torch's own norm
    for step in steps.values():
        last = step.backwards[-1].gradients.get(track.key) if step.backwards else None
        if last is None or step.gradients is None:
            continue
        squared = sum(float(n) ** 2 for n in last.norms if n == n)
        after = sum(float(n) ** 2 for n in step.gradients.norms if n == n)
        call = _counted(step, squared)
        if call is not None and after < (1.0 - _CLOSE) * squared:
            return _norm_twice(track, number, squared, call)
    return None


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


def _of_the_whole_twice(track: SharedTrack, number: int) -> Finding | None:
    """The norm of sharded gradients, put together on every rank, and then added up over ranks."""
    steps = track.steps(number)
    held = [p for of_rank in track.tracks.values() for p in of_rank.parameters]
    if len(steps) < len(track.ranks) or not all(p.sharded for p in held):
        return None
    squared = sum(sum(_squares(track, rank, step).values()) for rank, step in steps.items())
    calls = [_counted(step, squared) for step in steps.values()]
    smaller = all(_was_made_smaller(track, rank, step) for rank, step in steps.items())
    if squared and smaller and calls[0] is not None and None not in calls:
        return _norm_twice(track, number, squared, calls[0])
    return None


def _replicas_counted(track: SharedTrack, number: int) -> Finding | None:
    """A norm over pieces, to which every rank has added what all of them have whole."""
    steps = track.steps(number)
    if not track.apart or len(steps) < len(track.ranks):
        return None
    whole = {shared.name for shared in track.parameters}
    whole -= {d.name for d in track.differences("gradients", number)}
    if not whole:
        return None
    squares = {rank: _squares(track, rank, step) for rank, step in steps.items()}
    calls = [_added_up(step, sum(squares[rank].values())) for rank, step in steps.items()]
    call = calls[0]
    if call is None or any(other is None for other in calls):
        return None
    total = sum(sum(of_rank.values()) for of_rank in squares.values())
    again = sum(square for name, square in squares[track.ranks[0]].items() if name in whole)
    smaller = all(_was_made_smaller(track, rank, step) for rank, step in steps.items())
    if abs((call.after or 0.0) - total) > _CLOSE * total or again < _APART * total or not smaller:
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


def _squares(track: SharedTrack, rank: int, step: Step) -> dict[str, float]:
    last = step.backwards[-1].gradients.get(track.key) if step.backwards else None
    if last is None:
        return {}
    names = [p.name for p in track.tracks[rank].parameters]
    norms = np.nan_to_num(last.norms)
    return {name: float(norm) ** 2 for name, norm in zip(names, norms, strict=True)}


def _was_made_smaller(track: SharedTrack, rank: int, step: Step) -> bool:
    used = step.gradients
    before = sum(_squares(track, rank, step).values())
    return used is not None and float((np.nan_to_num(used.norms) ** 2).sum()) < before * (
        1.0 - _CLOSE
    )


def _added_up(step: Step, squared: float) -> Collective | None:
    """The call that was given this number, and gave back what all ranks gave together."""
    for call in step.collectives:
        if (call.op, call.reduction) not in _ADDED_UP or len(call.group) < 2:
            continue
        if call.before is None or call.after is None or call.parameter is not None:
            continue
        if abs(call.before - squared) <= _CLOSE * squared:
            return call
    return None


def _counted(step: Step, squared: float) -> Collective | None:
    call = _added_up(step, squared)
    if call is None or call.after is None:
        return None
    size = len(call.group)
    return call if abs(call.after - size * squared) <= _CLOSE * call.after else None
