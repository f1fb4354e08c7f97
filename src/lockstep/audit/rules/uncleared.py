# SPDX-License-Identifier: Apache-2.0
"""LS116: gradients that no step's end clears, so that each step adds to those of all before.

Gathering on purpose clears now and then: one step whose backward began without those of the step
before is enough for silence. Only in a trainer's run, whose loops are known to train one model.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Step, Track
    from lockstep.audit.rules.base import Explained
    from lockstep.audit.world import World

UNCLEARED: Final = Code("LS116", "gradients are never cleared", "notice")

_IN_A_ROW: Final = 3
"""Steps; two losses with a step each, cleared together, look alike for one."""


class Uncleared:
    """Each backward begins with the gradients that the step before has used."""

    codes = (UNCLEARED,)

    def judge(self, world: World, explained: Explained) -> Iterator[Finding]:
        """In each optimizer's steps that were looked at, one after the other."""
        if not world.fact("lockstep"):
            return
        for shared in world.tracks:
            kept = {rank: _keeping(shared.tracks[rank]) for rank in shared.ranks}
            ranks = [rank for rank, steps in kept.items() if len(steps) >= _IN_A_ROW]
            if not ranks:
                continue
            steps = kept[ranks[0]]
            numbers = [step.number + 1 for step in steps]
            yield UNCLEARED.finding(
                f"in each of the steps {numbers[0]} to {numbers[-1]}, backward began with the"
                " gradients that the step before had used, and added to them: they grow from step"
                " to step",
                "call `optimizer.zero_grad()` once a step, before backward",
                rank=ranks,
                step=numbers[-1],
                evidence={"steps": numbers},
                where=steps[-1].where,
            )


def _keeping(track: Track) -> list[Step]:
    """Steps that began with the gradients of the one before; none if another one did not."""
    found: list[Step] = []
    for last, step in itertools.pairwise(track.steps):
        backwards = [b for b in step.backwards if b.kind == "backward" and track.key in b.before]
        if step.number != last.number + 1 or last.gradients is None or not backwards:
            continue
        before = backwards[0].before[track.key]
        is_there = np.nan_to_num(before.norms).any()
        if not is_there or (before.hashes != last.gradients.hashes).any():
            return []
        found.append(step)
    return found
