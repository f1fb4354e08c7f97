# SPDX-License-Identifier: Apache-2.0
"""Gradients that are cleared between a backward and its step, so that it finds none, or never."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.diagnoses.micro_batches import CLEARED
from lockstep.audit.rules.base import Code, Rule, at_step
from lockstep.audit.rules.left_by_backward import adding_backwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lockstep.audit.facts import Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

NEVER = Code("LS116", "gradients are never cleared", "notice")

_STEPS: Final = 3
"""What a step does once or twice may be meant."""


def _look(world: World) -> Iterable[Finding]:
    """Of each optimizer, whether it is so in all steps that tell, and on all ranks.

    That gradients are never cleared is a notice: a program may add them up over its steps on
    purpose. It is a warning where those of another optimizer are cleared.
    """
    for track in world.tracks:
        if _steps_of_all(track, _found_nothing):
            yield _as_cleared(track)
        steps = 0 if track in world.alone else _steps_of_all(track, _left_over)
        if steps:
            others = [each for each in world.tracks if each is not track]
            yield _as_never_cleared(track, steps, any(map(_is_cleared, others)))


CLEARING = Rule((NEVER, CLEARED), _look)


def _steps_of_all(track: SharedTrack, look: Callable[[SharedTrack, int], Iterable[bool]]) -> int:
    """How many steps of each rank tell, if it is so in all of them; else 0."""
    seen = [list(look(track, rank)) for rank in track.ranks]
    steps = min(map(len, seen), default=0)
    return steps if steps >= _STEPS and all(map(all, seen)) else 0


def _is_cleared(track: SharedTrack) -> bool:
    """In each step that tells, on all ranks."""
    seen = [list(_left_over(track, rank)) for rank in track.ranks]
    return min(map(len, seen), default=0) >= _STEPS and not any(map(any, seen))


def _found_nothing(track: SharedTrack, rank: int) -> Iterator[bool]:
    """For each step that had a backward: did it find none of the gradients that were brought?"""
    for step in _with_backwards(track, rank):
        # Else the backward runs inside the step, or the step inside the backward.
        outside = not step.has_closure and not step.inside_backward
        left = adding_backwards(step, track.key)[-1].gradients[track.key]
        used = step.gradients
        yield outside and used is not None and _are_there(left) and not _are_there(used)


def _with_backwards(track: SharedTrack, rank: int) -> Iterator[Step]:
    for number in track.numbers_of(rank):
        step = track.step(rank, number)
        if step is not None and adding_backwards(step, track.key):
            yield step


def _are_there(gradients: Fingerprint) -> bool:
    return bool(np.nan_to_num(gradients.norms).any())


def _as_cleared(track: SharedTrack) -> Finding:
    step = next(_with_backwards(track, track.ranks[0]))
    where = [*adding_backwards(step, track.key)[-1].where, *step.where]
    return CLEARED.finding(
        f"backward brought gradients, and {track.first.optimizer} found none of them when it "
        f"stepped, in each of the first {_STEPS} steps: nothing is trained",
        "call `optimizer.zero_grad()` before the step's backward or after `optimizer.step()`, "
        "not between them",
        **at_step(track, step.number, where=where),
    )


def _left_over(track: SharedTrack, rank: int) -> Iterator[bool]:
    """For each step after the first that was looked at closely: did it add to the one before?"""
    for number in track.numbers_of(rank)[1:]:
        last, step = track.step(rank, number - 1), track.step(rank, number)
        if last is None or step is None or not step.backwards or not step.backwards[0].before:
            break
        yield _adds_to(last, step, track.key)


def _adds_to(last: Step, step: Step, key: str) -> bool:
    """The first backward began with what the last step had used, and nothing was cleared since."""
    begun = [b.before[key] for b in adding_backwards(step, key)]
    if not begun or last.gradients is None:
        return False
    kept = np.array_equal(begun[0].hashes, last.gradients.hashes)
    return kept and all(map(_are_there, begun))


def _as_never_cleared(track: SharedTrack, steps: int, others_are_cleared: bool) -> Finding:
    where = track.first.steps[1].where
    at = f" (`step()` at {where[0].at})" if where else ""
    return NEVER.finding(
        f"{track.first.optimizer}{at}: in each of the steps 2 to {steps + 1} backward added to the "
        "gradients that the step before had used: they are those of all batches so far, and grow"
        + (". Another optimizer's are cleared" if others_are_cleared else ""),
        "call `optimizer.zero_grad()` once a step, unless they are added up on purpose",
        severity="warning" if others_are_cleared else None,
        rank=track.ranks,
        step=2,  # which a long run may have dropped
        evidence={"steps": steps},
        where=where,
        optimizer=track.first.key_of_all,
    )
