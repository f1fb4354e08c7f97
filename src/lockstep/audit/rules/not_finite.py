# SPDX-License-Identifier: Apache-2.0
"""A step whose gradients are not finite: each rank alone goes wrong with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.rules.base import Code, Rule, at_step, named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Step, Track
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

NOT_FINITE = Code("LS115", "a step with NaN or infinity")


def _look(world: World) -> Iterable[Finding]:
    """The first step of each optimizer whose gradients are not finite; all later ones follow it.

    A step that a GradScaler leaves out is none: its optimizer is not called, or leaves out itself.
    Nor is one that the program's own optimizer leaves out, and with it the weights as they were.
    """
    for track in world.tracks:
        found = {
            rank: min(went_wrong, key=lambda step: step.number)
            for rank, one in track.tracks.items()
            if (went_wrong := [step for step in one.steps if _has_gone_wrong(one, step)])
        }
        if found:
            number = min(step.number for step in found.values())
            first = {rank: step for rank, step in found.items() if step.number == number}
            yield _not_finite(track, number, first)
            return  # one model's are soon the other's


NON_FINITE_STEPS = Rule((NOT_FINITE,), _look)


def _has_gone_wrong(track: Track, step: Step) -> bool:
    """Did the step change the weights whose gradients were not finite, or leave them so as well?"""
    before, after = step.entry, step.exit
    if before is None or after is None or len(after.hashes) != len(track.parameters):
        return bool(step.not_finite)
    start = 0
    for place, param in enumerate(track.parameters):
        left = after.samples[start : start + param.samples]
        start += param.samples
        # Elements of a piece that other ranks have are NaN; of a large model not each parameter has
        # samples.
        spoils = np.isnan(left).all() if param.sharded else not np.isfinite(left).all()
        is_spoiled = left.size > 0 and spoils
        is_changed = before.hashes[place] != after.hashes[place]
        if param.name in step.not_finite and (is_changed or is_spoiled):
            return True
    return False


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
