# SPDX-License-Identifier: Apache-2.0
"""A schedule that steps once for each rank, and has come to its end long before training has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.diagnoses.scale import TIMES
from lockstep.audit.rules.base import Rule
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack

_IDLE: Final = 0.25
"""Of all steps, at least so many were taken with a rate of 0."""


def _look(world: World) -> Iterable[Finding]:
    """Steps of a schedule against those of its optimizer, and the rate that came of it."""
    if world.size < 2:
        return
    for track in world.compared:
        found = _judge(world, track)
        if found is not None:
            yield found


SCHEDULES = Rule((TIMES,), _look, (World.has_failed,))


def _judge(world: World, track: SharedTrack) -> Finding | None:
    noted = [f.schedules[track.key] for f in world.facts if track.key in f.schedules]
    counts = {of_rank.count for of_rank in track.tracks.values()}
    if len(noted) < world.size or len(counts) > 1:
        return None
    taken = counts.pop()
    between = taken - 1  # what a schedule did before the optimizer's first step does not count
    exact = all(abs(each.count - world.size * between) <= world.size for each in noted)
    times = {round(each.count / between) for each in noted} if between else set()
    if times != {world.size} or not exact or any(each.schedules > 1 for each in noted):
        return None
    since = _idle_since(track)
    if since is None or taken - since < _IDLE * taken:
        return None
    return TIMES.finding(
        f"the schedule stepped {world.size} times, the number of ranks, for each optimizer step, "
        f"and has set the learning rate to 0 by step {since + 1} of {taken}: nothing was learnt "
        "after that",
        "count the schedule's length in steps of one rank: the loader's length before it is "
        "prepared, or that of the prepared one times the number of ranks; or do not prepare the "
        "schedule",
        rank=track.ranks,
        step=since + 1,
        evidence={"schedule": noted[0].count, "optimizer": between, "idle": taken - since},
        where=noted[0].where,
    )


def _idle_since(track: SharedTrack) -> int | None:
    """The first step from which on the rate of all groups is 0, after one in which it was not."""
    first: int | None = None
    was_at_work = False
    for step in track.first.steps:
        at_work = any(group.get("lr", 1.0) > 0.0 for group in step.hyper)
        was_at_work |= at_work
        if at_work:
            first = None
        elif first is None and was_at_work:
            first = step.number
    return first
