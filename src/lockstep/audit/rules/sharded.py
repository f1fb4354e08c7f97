# SPDX-License-Identifier: Apache-2.0
"""What ``fully_shard`` was told to do with gradients: not to reduce them yet, not to divide."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.audit.rules.base import Explained, first_found, first_of_each, named
from lockstep.audit.rules.gradients import BYPASSED
from lockstep.audit.rules.left_by_backward import uses_what_backward_left
from lockstep.audit.rules.scale import UNDIVIDED, is_made_up_for, is_one_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Step, Term
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


class Unreduced:
    """Gradients of micro-batches that were still waiting to be reduced when the step came."""

    codes = (BYPASSED,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for track in world.compared:
            found = None if track.key in explained.tracks else first_found(track, _unreduced)
            if found is not None:
                explained.tracks.add(track.key)
                yield found


def _unreduced(track: SharedTrack, number: int) -> Finding | None:
    waiting = {r: s for r, s in track.steps(number).items() if s.unreduced}
    if not waiting:
        return None
    rank, step = next(iter(waiting.items()))
    names: list[str] = step.unreduced["names"]
    held = len(track.tracks[rank].parameters)
    what = f"all {held} parameters" if 3 < len(names) == held else named(names)
    return BYPASSED.finding(
        f"step {number + 1}: when the optimizer stepped, gradients of {what} that "
        f"{_backwards(step.unreduced)} had left were not reduced: `fully_shard` keeps them back, "
        "this step does without them, and they are added to those of a later step",
        "reduce in the last micro-batch before each step: "
        "`model.set_requires_gradient_sync((i + 1) % k == 0)`, before its forward",
        rank=sorted(waiting),
        step=number + 1,
        parameters=names,
        evidence={"reason": "not reduced yet", "backwards": step.unreduced["backwards"]},
        where=[*step.unreduced["where"], *step.where],
    )


def _backwards(unreduced: dict[str, Any]) -> str:
    count = unreduced["backwards"]
    return f"the last {count} backwards" if count > 1 else "the last backward"


class Undivided:
    """A divisor of 1 for gradients of means."""

    codes = (UNDIVIDED,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        return first_of_each(world, explained, partial(_undivided, world))


def _undivided(world: World, track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    step = next(iter(steps.values()))
    added_up = [n for n, by in step.divided.items() if by["ranks"] > 1 and by["factor"] == 1.0]
    if not added_up or is_made_up_for(track) or len(steps) < len(track.ranks):
        return None
    if len(added_up) < len(track.tracks[track.ranks[0]].parameters) and world.fact("all_to_all"):
        return None  # experts: what tokens of other ranks' losses give is weighed elsewhere
    if not all(
        _is_torchs_mean(s) and uses_what_backward_left(s, track.key) for s in steps.values()
    ):
        return None
    ranks = int(step.divided[added_up[0]]["ranks"])
    return UNDIVIDED.finding(
        f"step {number + 1}: each rank's loss is a mean over its own batch, and `fully_shard` "
        f"added up the gradients of {named(added_up)} over {ranks} ranks and divided them by 1, "
        f"its gradient divide factor: they are {ranks} times those of the mean over all samples",
        "leave `set_gradient_divide_factor(1.0)` out: without it the gradients are averaged; or "
        "divide each rank's sum of losses by the number of all ranks' samples",
        rank=track.ranks,
        step=number + 1,
        parameters=added_up,
        evidence={"factor": 1.0, "ranks": ranks},
        where=[*step.backwards[-1].where, *step.where],
    )


def _is_torchs_mean(step: Step) -> bool:
    """A sum that is divided by hand may be divided by what all ranks have: a factor of 1 is why.

    Not where the divisor is the number of elements that this rank's loss was computed of.
    """
    terms = [term for b in step.backwards for term in b.terms]
    gathers = any(b.gathered or b.hooked for b in step.backwards)
    return is_one_mean(step) and not gathers and not any(map(_may_be_of_all, terms))


def _may_be_of_all(mean: Term) -> bool:
    return "/" in mean.op and (mean.op.startswith("sum/") or " of " in mean.op)
