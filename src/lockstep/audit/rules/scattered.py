# SPDX-License-Identifier: Apache-2.0
"""ZeRO by hand: gradients that are added up and scattered, and that nobody divides.

Each rank's optimizer steps over its own part of all weights. What its parts are matters not: how
long the gradients were that backward left, that went in, that came out and that were used tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.diagnoses.scale import UNDIVIDED, rate_is_divided
from lockstep.audit.expectation import is_near, is_one_mean, share_one_loss
from lockstep.audit.ledger import SCATTERING
from lockstep.audit.rules.base import Code, first_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Collective, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


class Scattered:
    """Judges steps of optimizers that use what a reduce-scatter left."""

    codes: tuple[Code, ...] = (UNDIVIDED,)

    def judge(self, world: World) -> Iterable[Finding]:
        if not world.sync_of_lockstep():
            yield from first_of_each(world.compared, _judge_step)


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    size = len(steps)
    if size < track.world_size or not all(_is_own_mean(step) for step in steps.values()):
        return None
    if rate_is_divided(track):
        return None
    if share_one_loss(steps.values()) or not all(_used_the_sum(s, size) for s in steps.values()):
        return None
    step = next(iter(steps.values()))
    call = _scatters(step)[0]
    return UNDIVIDED.finding(
        f"step {number + 1}: each rank's loss is a mean over its own batch, `{call.op}` added the "
        f"gradients up over {size} ranks, and the optimizer used its part of the sum undivided: "
        f"{size} times that of the mean over all samples",
        "use op=ReduceOp.AVG, or divide by the world size before the reduce-scatter or after it",
        rank=sorted(steps),
        step=number + 1,
        evidence={"before": call.before, "after": call.after, "ranks": size},
        where=[*call.where, *step.where],
    )


def _scatters(step: Step) -> list[Collective]:
    return [c for c in step.collectives if c.op in SCATTERING and not c.in_backward]


def _is_own_mean(step: Step) -> bool:
    """And nothing came from other ranks, was clipped, scaled or averaged by a wrapper."""
    changed = step.clips or step.scale is not None or step.has_closure
    apart = not any(b.gathered or b.wrappers for b in step.backwards)
    return not changed and apart and is_one_mean(step)


def _used_the_sum(step: Step, size: int) -> bool:
    calls = _scatters(step)
    if not calls or step.gradients is None:
        return False
    if any(c.reduction != "SUM" or len(c.group) != size or not c.after for c in calls):
        return False
    given = _together([c.before or 0.0 for c in calls])
    received = _together([c.after or 0.0 for c in calls])
    used = _together(np.nan_to_num(step.gradients.norms).tolist())
    left = step.backwards[-1].left
    return is_near(used, received) and any(is_near(given, length) for length in left)


def _together(lengths: list[float]) -> float:
    return float(np.linalg.norm(lengths))
