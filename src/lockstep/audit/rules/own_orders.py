# SPDX-License-Identifier: Apache-2.0
"""Ranks that each shuffle the whole data for themselves, and each take a rank's share of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from lockstep.audit.rules.overlap import SAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.facts import Permutation
    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_LEAST_PASSES: Final = 2
_LEAST_STEPS: Final = 4
"""In an epoch: of fewer, a share of the data may be so many samples by chance."""


def own_orders(world: World) -> Finding | None:
    """A line that draws another order on each rank, of so many samples as all ranks train on.

    What is shuffled may be changed before it is trained on, so that no sample is known again. Where
    a loader gives the samples, they have numbers, and what is shuffled may be something else.
    """
    if not world.ledgers or any(x.training for y in world.ledgers.values() for x in y.loadings):
        return None
    drawn = {rank: _by_line(ledger.permutations) for rank, ledger in world.ledgers.items()}
    lines = set.intersection(*(set(of_rank) for of_rank in drawn.values()))
    for track in world.compared:
        for line in sorted(lines, key=lambda place: (place.file, place.line or 0)):
            of_ranks = [drawn[rank][line] for rank in track.ranks]
            if _differ(of_ranks) and all(_takes_its_share(track, x) for x in of_ranks):
                return replace(_found(track, of_ranks[0][0]), optimizer=track.first.key_of_all)
    return None


def _by_line(permutations: Sequence[Permutation]) -> dict[Place, list[Permutation]]:
    found: dict[Place, list[Permutation]] = {}
    for each in permutations:
        found.setdefault(each.where[0], []).append(each)
    return found


def _differ(of_ranks: Sequence[Sequence[Permutation]]) -> bool:
    """Of as many samples on all ranks, and each time in another order on each."""
    at_once = list(zip(*of_ranks, strict=False))
    return all(
        len({each.size for each in of_all}) == 1
        and len({each.hash for each in of_all}) == len(of_all) > 1
        for of_all in at_once
    )


def _takes_its_share(track: SharedTrack, drawn: Sequence[Permutation]) -> bool:
    """From one draw to the next, does a rank train on what one rank's share of the samples is?"""
    batch = max((_samples(track, rank) for rank in track.ranks), default=0)
    passes = [(after.step - before.step, before.size) for before, after in pairwise(drawn)]
    share = len(track.ranks)
    return len(passes) >= _LEAST_PASSES and all(
        steps >= _LEAST_STEPS and abs(steps * batch - size / share) < max(batch, 1)
        for steps, size in passes
    )


def _samples(track: SharedTrack, rank: int) -> int:
    """That a rank's first step trained on."""
    numbers = track.numbers_of(rank)
    step = track.step(rank, numbers[0]) if numbers else None
    if step is None or not step.fed_shapes or not step.fed_shapes[0]:
        return 0
    return step.fed_shapes[0][0] * len(step.backwards)


def _found(track: SharedTrack, drawn: Permutation) -> Finding:
    return SAME.finding(
        f"each of ranks {track.ranks} draws its own order of {drawn.size} samples at "
        f"{drawn.where[0].at} and trains on as many of them as are its share: some samples are "
        "then read by several ranks, and others by none",
        "draw the order from a generator that all ranks seed alike, anew in each epoch, as "
        "`np.random.default_rng(seed + epoch).permutation(n)`, and then take the rank's part",
        severity="warning",
        rank=track.ranks,
        evidence={"samples": drawn.size, "ranks": len(track.ranks)},
        where=drawn.where,
    )
