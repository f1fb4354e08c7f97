# SPDX-License-Identifier: Apache-2.0
"""Steps that find no gradients, though a backward brought some: cleared between the two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.diagnoses.micro_batches import CLEARED
from lockstep.audit.rules.left_by_backward import adding_backwards

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_STEPS: Final = 3
"""A step that is taken without gradients once or twice may be meant."""


class ClearedEarly:
    """Of each optimizer, whether all its steps that had a backward found nothing, on all ranks."""

    codes = (CLEARED,)

    def judge(self, world: World) -> Iterable[Finding]:
        for track in world.tracks:
            if track.ranks and all(_finds_nothing(track, rank) for rank in track.ranks):
                yield replace(_cleared(track), optimizer=track.key)


def _finds_nothing(track: SharedTrack, rank: int) -> bool:
    steps = list(_with_backwards(track, rank))
    return len(steps) >= _STEPS and all(_was_cleared(step, track.key) for step in steps)


def _with_backwards(track: SharedTrack, rank: int) -> Iterable[Step]:
    for number in track.numbers_of(rank):
        step = track.step(rank, number)
        if step is not None and adding_backwards(step, track.key):
            yield step


def _was_cleared(step: Step, key: str) -> bool:
    if step.has_closure or step.inside_backward or step.gradients is None:
        return False  # the backward runs inside the step, or the step inside the backward
    left = adding_backwards(step, key)[-1].gradients[key]
    return _are_there(left) and not _are_there(step.gradients)


def _are_there(gradients: Fingerprint) -> bool:
    return bool(np.nan_to_num(gradients.norms).any())


def _cleared(track: SharedTrack) -> Finding:
    step = next(iter(_with_backwards(track, track.ranks[0])))
    return CLEARED.finding(
        f"backward brought gradients, and {track.first.optimizer} found none of them when it "
        f"stepped, in each of the first {_STEPS} steps: nothing is trained",
        "call `optimizer.zero_grad()` before the step's backward or after `optimizer.step()`, "
        "not between them",
        rank=track.ranks,
        step=step.number + 1,
        where=[*adding_backwards(step, track.key)[-1].where, *step.where],
    )
