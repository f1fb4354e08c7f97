# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute the same: with the same random numbers, from the same inputs.

Notices: it can be meant, and a batch that was made by hand says nothing of where it comes from.
Ranks that also come to the same losses, whose gradients a wrapper averages, have shared nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.audit.rules.arguments import drawn_alike
from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

RANDOM = Code("LS507", "the same random numbers on all ranks", "notice")
INPUTS = Code("LS508", "the same inputs on all ranks", "notice")

_STEPS = 3
_SEEDED = {"torch": "torch.manual_seed", "numpy": "np.random.seed"}


class Repetition:
    """Compares the generator's state and the models' inputs, step by step."""

    codes = (RANDOM, INPUTS)

    def judge(self, world: World) -> Iterable[Finding]:
        if world.is_model_parallel or world.sync_of_lockstep():
            return
        for track in world.compared:
            found = [f for f in (_same_noise(track), _same_inputs(track)) if f is not None]
            yield from (replace(f, optimizer=track.key) for f in found)
            if found:
                return


def _same_noise(track: SharedTrack) -> Finding | None:
    return _same_random(track) or _same_arguments(track)


def _same_arguments(track: SharedTrack) -> Finding | None:
    alike = drawn_alike(track)
    if alike is None:
        return None
    return RANDOM.finding(
        f"{alike.same}, {alike.size} numbers in no order and new in each step, was the same on all "
        f"ranks in steps {alike.steps[0] + 1} to {alike.steps[-1] + 1}, while {alike.other} was "
        "not: noise repeats from rank to rank if it was drawn",
        "seed the generator that it is drawn from with the rank: "
        "`torch.Generator().manual_seed(seed + rank)`, if the draws are meant to differ",
        rank=track.ranks,
        step=alike.steps[0] + 1,
        evidence={"same": alike.same, "different": alike.other, "steps": len(alike.steps)},
        where=alike.where,
    )


def _same_random(track: SharedTrack) -> Finding | None:
    found = [f for kind in ("torch", "numpy") if (f := _same_draws(track, kind)) is not None]
    return found[0] if found else None


def _same_draws(track: SharedTrack, kind: str) -> Finding | None:
    """Between a step and the next forward: a dropout inside the model has the samples to differ."""
    drawn = 0
    where: list[Place] = []
    for before, number in itertools.pairwise(track.numbers[:16]):
        ends = {step.random.get(kind) for step in track.steps(before).values()}
        steps = track.steps(number).values()
        begins = {step.inputs[0]["random"][kind] if step.inputs else None for step in steps}
        if len(ends) != 1 or len(begins) != 1 or None in begins or len(steps) < len(track.ranks):
            return None
        if number == before + 1 and ends != begins:
            drawn += 1
            where = where or next(iter(steps)).inputs[0]["where"]
    # An epoch's shuffling alone draws once.
    if drawn < _STEPS:
        return None
    return RANDOM.finding(
        f"before {drawn} forwards each rank drew random numbers from {kind}'s generator, and all "
        "ranks drew the same: noise and augmentation repeat from rank to rank",
        f"after the model is built, `{_SEEDED[kind]}(seed + rank)`, if they are meant to differ",
        rank=track.ranks,
        evidence={"forwards": drawn},
        where=where,
    )


def _same_inputs(track: SharedTrack) -> Finding | None:
    seen: list[int] = []
    where: list[Place] = []
    for number in track.numbers[:16]:
        inputs = [step.inputs for step in track.steps(number).values()]
        if len(inputs) < len(track.ranks) or any(not i for i in inputs):
            return None
        for at_once in zip(*inputs, strict=False):
            if len({i["hash"] for i in at_once}) > 1:
                return None
            seen.append(at_once[0]["hash"])
            where = where or at_once[0]["where"]
    if len(set(seen)) < _STEPS:
        return None
    same_losses = _same_losses(track)
    return INPUTS.finding(
        f"the model was given the same inputs on all ranks, {len(seen)} times"
        + (", and all ranks computed the same losses" if same_losses else "")
        + f": {len(track.ranks)} ranks do the work of one",
        "give each rank its own samples: a DistributedSampler, or seed what makes the batches with "
        "the rank",
        severity="warning" if same_losses else None,
        rank=track.ranks,
        evidence={"forwards": len(seen)},
        where=where,
    )


def _same_losses(track: SharedTrack) -> bool:
    """To the bit, and changing: then what is averaged was the same before."""
    seen: list[float | None] = []
    for number in track.numbers[:16]:
        losses = [[b.loss for b in step.backwards] for step in track.steps(number).values()]
        if any(of_rank != losses[0] for of_rank in losses) or None in losses[0]:
            return False
        seen += losses[0]
    return len(set(seen)) >= _STEPS
