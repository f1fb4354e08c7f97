# SPDX-License-Identifier: Apache-2.0
"""Gradients with which a step goes wrong on each rank alone: not finite, or never cleared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.rules.base import Code, at_step, named
from lockstep.audit.rules.left_by_backward import adding_backwards

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

NOT_FINITE = Code("LS115", "a step with NaN or infinity")


class NotFinite:
    """The first step of each optimizer whose gradients are not finite; all later ones follow it.

    A step that a GradScaler leaves out is none: its optimizer is not called, or leaves out itself.
    """

    codes = (NOT_FINITE,)

    def judge(self, world: World) -> Iterable[Finding]:
        for track in world.tracks:
            found = {
                rank: min((s for s in one.steps if s.not_finite), key=lambda s: s.number)
                for rank, one in track.tracks.items()
                if any(s.not_finite for s in one.steps)
            }
            if found:
                number = min(step.number for step in found.values())
                first = {rank: step for rank, step in found.items() if step.number == number}
                yield _not_finite(track, number, first)
                return  # one model's are soon the other's


def _not_finite(track: SharedTrack, number: int, steps: dict[int, Step]) -> Finding:
    step = next(iter(steps.values()))
    names = sorted({name for each in steps.values() for name in each.not_finite})
    losses = [b.loss for each in steps.values() for b in each.backwards if b.loss is not None]
    wrong = [loss for loss in losses if not math.isfinite(loss)]
    where = [*(step.backwards[-1].where if step.backwards else ()), *step.where]
    loss = f", and so was the loss ({wrong[0]})" if wrong else "; the loss was finite"
    return NOT_FINITE.finding(
        f"step {number + 1}: the gradients of {named(names)} ({len(names)} of "
        f"{len(track.first.parameters)} parameters) were not finite on ranks "
        f"{sorted(steps)}{loss if losses else ''}: the step put NaN or infinity into the weights, "
        "and everything after it is computed from them",
        "look at that step's samples; `torch.autograd.set_detect_anomaly(True)` names the operation"
        ". To go on, step only if the gradients are finite on all ranks, or clip them before",
        parameters=names,
        evidence={"losses": losses[:8]},
        **at_step(track, number, rank=sorted(steps), where=where, optimizer=""),
    )


NEVER = Code("LS116", "gradients are never cleared", "notice")

_STEPS: Final = 3
"""A step that is not followed by ``zero_grad`` once or twice may be meant."""


class NeverCleared:
    """A notice: a program may add up gradients over its steps on purpose."""

    codes = (NEVER,)

    def judge(self, world: World) -> Iterable[Finding]:
        for track in world.tracks:
            seen = [_left_over(track, rank) for rank in track.ranks]
            if track not in world.alone and all(
                len(of_rank) >= _STEPS and all(of_rank) for of_rank in seen
            ):
                yield replace(_never_cleared(track, min(map(len, seen))), optimizer=track.key)


def _left_over(track: SharedTrack, rank: int) -> list[bool]:
    """For each step after the first that was looked at closely: did it add to the one before?"""
    found = []
    for number in track.numbers_of(rank)[1:]:
        last, step = track.step(rank, number - 1), track.step(rank, number)
        if last is None or step is None or not step.backwards or not step.backwards[0].before:
            break
        found.append(_adds_to(last, step, track.key))
    return found


def _adds_to(last: Step, step: Step, key: str) -> bool:
    """The first backward began with what the last step had used, and nothing was cleared since."""
    begun = [b.before[key] for b in adding_backwards(step, key)]
    if not begun or last.gradients is None:
        return False
    kept = np.array_equal(begun[0].hashes, last.gradients.hashes)
    return kept and all(np.nan_to_num(before.norms).any() for before in begun)


def _never_cleared(track: SharedTrack, steps: int) -> Finding:
    where = track.first.steps[1].where
    at = f" (`step()` at {where[0].at})" if where else ""
    return NEVER.finding(
        f"{track.first.optimizer}{at}: in each of the steps 2 to {steps + 1} backward added to the "
        "gradients that the step before had used: they are those of all batches so far, and grow",
        "call `optimizer.zero_grad()` once a step, unless they are added up on purpose",
        rank=track.ranks,
        step=2,
        evidence={"steps": steps},
        where=where,
    )
