# SPDX-License-Identifier: Apache-2.0
"""Gradients that ``fully_shard`` was told not to reduce yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import first_of_each, named
from lockstep.audit.rules.gradients import BYPASSED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


class Unreduced:
    """Gradients of micro-batches that were still waiting to be reduced when the step came."""

    codes = (BYPASSED,)

    def judge(self, world: World) -> Iterable[Finding]:
        return first_of_each(world.compared, _unreduced)


def _unreduced(track: SharedTrack, number: int) -> Finding | None:
    waiting = {
        r: (s, s.kept_back) for r, s in track.steps(number).items() if s.kept_back is not None
    }
    if not waiting:
        return None
    rank, (step, kept) = next(iter(waiting.items()))
    names = kept.names
    held = len(track.tracks[rank].parameters)
    what = f"all {held} parameters" if 3 < len(names) == held else named(names)
    return BYPASSED.finding(
        f"step {number + 1}: when the optimizer stepped, gradients of {what} that "
        f"{_backwards(kept.backwards)} had left were not reduced: `fully_shard` keeps them back, "
        "this step does without them, and they are added to those of a later step",
        "reduce in the last micro-batch before each step: "
        "`model.set_requires_gradient_sync((i + 1) % k == 0)`, before its forward",
        rank=sorted(waiting),
        step=number + 1,
        parameters=names,
        evidence={"reason": "not reduced yet", "backwards": kept.backwards},
        where=[*kept.where, *step.where],
    )


def _backwards(count: int) -> str:
    return f"the last {count} backwards" if count > 1 else "the last backward"
