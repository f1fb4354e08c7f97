# SPDX-License-Identifier: Apache-2.0
"""Clipping that finds no gradients, so that the step's are as long as they were."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.rules.base import Code, Rule, at_step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

CLIPPED_NOTHING = Code("LS119", "gradients were clipped where there were none")

_STEPS: Final = 3
"""A loss may be zero once or twice, and its gradients, too."""


def _look(world: World) -> Iterable[Finding]:
    """Of each optimizer, whether all its clips found nothing, on all ranks, and its steps did."""
    return itertools.islice(filter(None, map(_judge, world.tracks)), 1)


CLIPS = Rule((CLIPPED_NOTHING,), _look)


def _judge(track: SharedTrack) -> Finding | None:
    clipped = [
        [step for step in track.steps(number).values() if step.clips] for number in track.numbers
    ]
    clipped = [steps for steps in clipped if steps]
    if len(clipped) < _STEPS or not all(map(_found_nothing, itertools.chain(*clipped))):
        return None
    step = clipped[0][0]
    clip = step.clips[0]
    given = "" if clip.of else " and was given none of its parameters"
    return CLIPPED_NOTHING.finding(
        f"clipping (at {clip.where[0].at}) found gradients of norm 0{given} in each of "
        f"{len(clipped)} steps in which {track.first.optimizer} used others: no limit holds",
        "clip between the last backward of a step and `optimizer.step()`; give it a list, or "
        "`model.parameters()` anew each time: a generator, a `filter` or a `map` is empty once it "
        "was read",
        **at_step(track, step.number, where=[*clip.where, *step.where]),
    )


def _found_nothing(step: Step) -> bool:
    used = step.gradients
    is_used = used is not None and bool(np.nan_to_num(used.norms).any())
    return is_used and not any(clip.norm for clip in step.clips)
