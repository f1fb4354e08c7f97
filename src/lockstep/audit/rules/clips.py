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
    """Of each optimizer, whether from some step on all clips, on all ranks, have missed it."""
    return itertools.islice(filter(None, map(_judge, world.tracks)), 1)


CLIPS = Rule((CLIPPED_NOTHING,), _look)


def _judge(track: SharedTrack) -> Finding | None:
    clipped = [step for n in track.numbers for step in track.steps(n).values() if step.clips]
    names = [parameter.name for parameter in track.first.parameters]
    missed = list(itertools.dropwhile(lambda step: not _has_missed(step, names), clipped))
    numbers = {step.number for step in missed}
    if len(numbers) < _STEPS or not all(_has_missed(step, names) for step in missed):
        return None
    step = missed[0]
    clip = step.clips[0]
    given = "" if clip.missed else ", as it was given an iterator that had been read before"
    return CLIPPED_NOTHING.finding(
        f"clipping (at {clip.where[0].at}) found gradients of norm 0{given}, in each of "
        f"{len(numbers)} steps in which {track.first.optimizer} used others: no limit holds",
        "clip between the last backward of a step and `optimizer.step()`; give it a list, or "
        "`model.parameters()` anew each time: a generator, a `filter` or a `map` is empty once it "
        "was read",
        **at_step(track, step.number, where=[*clip.where, *step.where]),
    )


def _has_missed(step: Step, names: list[str]) -> bool:
    """Did all its clips find nothing, where the step used gradients of what they were given?

    Or of anything, if what they were given was an iterator at its end.
    """
    if step.gradients is None or any(clip.norm for clip in step.clips):
        return False
    norms = np.nan_to_num(step.gradients.norms)
    used = {name for name, norm in zip(names, norms, strict=True) if norm > 0.0}
    given = [clip.missed for clip in step.clips if clip.missed is not None]
    return any(used.intersection(missed) if missed else used for missed in given)
