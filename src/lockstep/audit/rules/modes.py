# SPDX-License-Identifier: Apache-2.0
"""Training mode on some ranks, evaluation mode on others."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, first_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

MODE = Code("LS311", "ranks train in different modes")


class Modes:
    """Compares `training` of the parts of the module that each rank's backward was about."""

    codes = (MODE,)

    def judge(self, world: World) -> Iterable[Finding]:
        # The module is one, however many optimizers step its parameters.
        return itertools.islice(first_of_each(world.compared, _at_step), 1)


def _at_step(track: SharedTrack, number: int) -> Finding | None:
    modes = {rank: step.mode for rank, step in track.steps(number).items() if step.mode is not None}
    alike = {(m.module, m.parts) for m in modes.values()}
    if len(modes) < len(track.ranks) or len(alike) > 1:
        return None
    if len({m.flags for m in modes.values()}) == 1:
        return None
    name, parts = alike.pop()
    trained = {rank: mode.training for rank, mode in modes.items()}
    counts = ", ".join(f"{count} of {parts} on rank {rank}" for rank, count in trained.items())
    return MODE.finding(
        f"step {number + 1}: parts of {name} that were in training mode: {counts}. Dropout and "
        "BatchNorm do not do the same on all ranks",
        "call `model.train()` on every rank after an evaluation, also where one rank evaluates",
        rank=sorted(trained),
        step=number + 1,
        evidence={
            "training": {str(rank): count for rank, count in trained.items()},
            "parts": parts,
        },
        where=next(iter(modes.values())).where,
    )
