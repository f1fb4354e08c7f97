# SPDX-License-Identifier: Apache-2.0
"""Replicas that step on their own, and then all get what one and the same rank came to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.rules.consumed import ONE_RANK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.rules.base import Explained
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_MEETINGS: Final = 3


class OneRank:
    """Averages of replicas are nobody's own; a copy of the best one's is not always one rank's."""

    codes = (ONE_RANK,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for track in world.compared:
            if track.key in explained.tracks:
                continue
            found = _judge(track)
            if found is not None:
                explained.tracks.add(track.key)
                yield found


def _judge(track: SharedTrack) -> Finding | None:
    followed: list[int] = []
    for previous in track.numbers:
        number = previous + 1
        apart = bool(track.differences("gradients", previous))
        if not apart or not track.differences("exit", previous) or number not in track.numbers:
            continue
        if track.differences("entry", number):
            return None  # they have not met
        source = _whose(track, previous, number)
        if source is None:
            return None
        followed.append(source)
    if len(followed) < _MEETINGS or len(set(followed)) > 1:
        return None
    others = [rank for rank in track.ranks if rank != followed[0]]
    first = next(iter(track.steps(track.numbers[0]).values()))
    return ONE_RANK.finding(
        f"after each step the ranks' weights differed, and {len(followed)} times the next step "
        f"began with those of rank {followed[0]} on all ranks: what ranks {others} computed "
        "is lost",
        "average the gradients before the step (`lockstep.average_gradients(model)`, a wrapper), "
        "instead of sending weights after it",
        rank=others,
        step=track.numbers[0] + 1,
        evidence={"used": followed[0]},
        where=first.where,
    )


def _whose(track: SharedTrack, previous: int, number: int) -> int | None:
    """The one rank with whose weights, as its step had left them, all ranks have gone on."""
    steps = track.steps(number)
    begun = next(iter(steps.values())).entry
    found = []
    for rank, step in track.steps(previous).items():
        left = step.exit
        if left is None or begun is None or left.hashes.shape != begun.hashes.shape:
            return None
        if (left.hashes == begun.hashes).all():
            found.append(rank)
    return found[0] if len(found) == 1 else None
