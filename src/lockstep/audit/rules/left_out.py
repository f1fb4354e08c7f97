# SPDX-License-Identifier: Apache-2.0
"""Layers that stay each rank's own, where the weights of all others are averaged now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import named
from lockstep.audit.rules.gradients import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.world import World


class LeftOut:
    """A notice: a client's norms, or its head, may stay at home on purpose."""

    codes = (UNKNOWN,)

    def judge(self, world: World) -> Iterable[Finding]:
        for track in world.compared:
            if track.at_home:
                names = sorted(track.at_home)
                yield UNKNOWN.finding(
                    f"the ranks average the weights of other layers, and never {named(names)}: "
                    "each rank has its own",
                    "average them as well, if all ranks are to have one model",
                    severity="notice",
                    rank=track.ranks,
                    parameters=names,
                    where=track.first.where,
                    optimizer=track.key,
                )
                return
