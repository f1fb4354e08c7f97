# SPDX-License-Identifier: Apache-2.0
"""Weights that nobody trains and training uses: a teacher, a target, a feature extractor."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.rules.base import first_of_each, named, numbers
from lockstep.audit.rules.replicas import BEFORE, BETWEEN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import FrozenModule, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_ALLOWED = 1e-6


class Frozen:
    """Compares what all ranks called in a step and no optimizer holds."""

    codes = (BEFORE, BETWEEN)

    def judge(self, world: World) -> Iterable[Finding]:
        if world.is_model_parallel:
            return
        for found in itertools.islice(first_of_each(world.in_step, _at_step), 1):
            # Where the replicas themselves differ, what follows them does too.
            yield replace(found, optimizer="*")


def _at_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    if len(steps) < len(track.ranks):
        return None
    for at_once in _side_by_side(steps):
        different = _different(at_once)
        if different:
            return _finding(track, number, at_once, different)
    return None


def _side_by_side(steps: dict[int, Step]) -> list[dict[int, FrozenModule]]:
    """The k-th module of a kind that each rank called, if all called as many of that kind.

    Not where all called the same modules, each in an order of its own.
    """
    found = []
    first = next(iter(steps.values()))
    for key in dict.fromkeys(each.key for each in first.frozen):
        alike = {r: [f for f in step.frozen if f.key == key] for r, step in steps.items()}
        as_many = len({len(modules) for modules in alike.values()}) == 1
        if as_many and len({_whatever_order(modules) for modules in alike.values()}) > 1:
            found += [
                dict(zip(alike, at_once, strict=True))
                for at_once in zip(*alike.values(), strict=True)
            ]
    return found


def _whatever_order(modules: list[FrozenModule]) -> tuple[bytes, ...]:
    return tuple(sorted(each.prints.hashes.tobytes() for each in modules))


def _different(at_once: dict[int, FrozenModule]) -> list[int]:
    """Not what an optimizer holds or held on a rank: its steps are where that is compared."""
    prints: list[Fingerprint] = [each.prints for each in at_once.values()]
    hashes = np.array([p.hashes for p in prints])
    norms = np.array([p.norms for p in prints])
    spread = norms.max(axis=0) - norms.min(axis=0)
    apart = (hashes != hashes[0]).any(axis=0) & ~(spread <= _ALLOWED * norms.max(axis=0))
    held = {name for each in at_once.values() for name in each.held}
    names = next(iter(at_once.values())).names
    return [int(place) for place in np.flatnonzero(apart) if names[place] not in held]


def _finding(
    track: SharedTrack, number: int, at_once: dict[int, FrozenModule], different: list[int]
) -> Finding:
    first = next(iter(at_once.values()))
    names = [first.names[place] for place in different]
    norms = {rank: float(each.prints.norms[different[0]]) for rank, each in at_once.items()}
    since = number > track.numbers[0]
    code = BETWEEN if since else BEFORE
    when = f"by step {number + 1}" if since else "at the first step"
    return code.finding(
        f"{when} the ranks called {first.module} modules that no optimizer trains and whose "
        f"weights differ: {named(names)} (norm of `{names[0]}`: {numbers(norms)})",
        "build, load and update it on every rank alike: nothing else makes it the same. If it is "
        "meant to differ, `lockstep.local(module)`",
        rank=sorted(norms),
        step=number + 1,
        parameters=names,
        evidence={"norms": {str(r): n for r, n in norms.items()}},
        where=first.where,
    )
