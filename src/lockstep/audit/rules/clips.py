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
    names = {rank: [p.name for p in of_rank.parameters] for rank, of_rank in track.tracks.items()}
    clipped = [
        (step, _has_missed(step, names[rank]))
        for number in track.numbers
        for rank, step in track.steps(number).items()
        if step.clips
    ]
    missed = list(itertools.dropwhile(lambda each: not each[1], clipped))
    numbers = {step.number for step, _ in missed}
    if len(numbers) < _STEPS or not all(has_missed for _, has_missed in missed):
        return None
    step, _ = missed[0]
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
    """Did all clips of a rank's step find nothing, and it used gradients of what they were given?

    Or of anything, if what they were given was an iterator at its end.

    Args:
        names: of the parameters that the rank's optimizer holds.
    """
    norms = np.empty(0) if step.gradients is None else np.nan_to_num(step.gradients.norms)
    if len(norms) != len(names) or any(clip.norm for clip in step.clips):
        return False
    used = {name for name, norm in zip(names, norms, strict=True) if norm > 0.0}
    given = [clip.missed for clip in step.clips if clip.missed is not None]
    return any(used.intersection(missed) if missed else used for missed in given)
