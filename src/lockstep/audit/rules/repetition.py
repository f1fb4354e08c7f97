# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute the same: with the same random numbers, from the same inputs.

Notices where it can be meant: a batch that was made by hand says nothing of where it comes from.
Noise for each sample is not meant to be the same, and ranks that also come to the same losses have
shared nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.audit.finding import SEVERITIES
from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.audit.facts import Draws, Step
    from lockstep.audit.finding import Finding, Place, Severity
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

RANDOM = Code("LS507", "the same random numbers on all ranks", "notice")
INPUTS = Code("LS508", "the same inputs on all ranks", "notice")

_STEPS = 3
_LOOKED_AT = 16
_NUMBERS = 8
"""A few may agree by chance, or for other reasons."""


class Repetition:
    """Compares what was drawn and the models' inputs, step by step."""

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
    return _same_draws(track) or _same_draws_of_numpy(track)


def _same_draws(track: SharedTrack) -> Finding | None:
    """A line that draws for each sample of a batch, the same on all ranks and new in each step."""
    by_line: dict[Place, list[list[Draws]]] = {}
    rows: set[int] = set()
    per_step = 1
    for number in track.numbers[:_LOOKED_AT]:
        steps = list(track.steps(number).values())
        of_ranks = [{drawn.where[0]: drawn for drawn in step.draws} for step in steps]
        if len(steps) < len(track.ranks) or _share_losses(steps):
            continue
        rows |= {shape[0] for step in steps for shape in step.fed_shapes if shape}
        per_step = max(per_step, len(steps[0].backwards))
        for line in of_ranks[0]:
            if all(line in of_rank for of_rank in of_ranks):
                by_line.setdefault(line, []).append([of_rank[line] for of_rank in of_ranks])
    found: list[Finding] = []
    for at_once in by_line.values():
        hashes = [{drawn.hash for drawn in of_ranks} for of_ranks in at_once]
        is_same = all(len(of_step) == 1 for of_step in hashes)
        if not is_same or len(set.union(*hashes)) < max(_STEPS, len(at_once)):
            continue
        severity = _gravity(track, at_once[0][0], rows, per_step)
        if severity is not None:
            found.append(_drawn_alike(track, at_once[0][0], len(at_once), severity))
    return max(found, key=lambda one: SEVERITIES.index(one.severity), default=None)


def _gravity(track: SharedTrack, drawn: Draws, rows: set[int], batches: int) -> Severity | None:
    """Was a row drawn for each sample of `batches`, or a tensor for each? None if for neither.

    Noise for weights has their shapes. Ranks may take the same places of data of their own on
    purpose, and decide together what becomes of a layer.
    """
    if any(drawn.shape == p.shape for held in track.held for p in held.described.values()):
        return None
    if drawn.shape and drawn.shape[0] in rows and math.prod(drawn.shape) >= _NUMBERS:
        return "warning" if "float" in drawn.dtype else "notice"
    return "notice" if any(n > 1 and drawn.count == n * batches for n in rows) else None


def _drawn_alike(track: SharedTrack, drawn: Draws, steps: int, severity: Severity) -> Finding:
    return RANDOM.finding(
        f"in {steps} steps all ranks drew the same random numbers at {drawn.where[0].at}, others "
        "in each step, while their losses differed: noise repeats from rank to rank",
        "seed the generator that it is drawn from with the rank, after the model is built: "
        "`torch.manual_seed(seed + rank)`, `torch.Generator().manual_seed(seed + rank)`",
        severity=severity,
        rank=track.ranks,
        evidence={"steps": steps, "shape": drawn.shape, "dtype": drawn.dtype},
        where=drawn.where,
    )


def _share_losses(steps: Sequence[Step]) -> bool:
    losses = [[backward.loss for backward in step.backwards] for step in steps]
    return all(of_rank == losses[0] for of_rank in losses)


def _same_draws_of_numpy(track: SharedTrack) -> Finding | None:
    """Between a step and the next forward: a dropout inside the model has the samples to differ."""
    drawn = 0
    where: list[Place] = []
    for before, number in itertools.pairwise(track.numbers[:_LOOKED_AT]):
        ends = {step.numpy_state for step in track.steps(before).values()}
        steps = track.steps(number).values()
        begins = {step.inputs[0].numpy_state if step.inputs else None for step in steps}
        if len(ends) != 1 or len(begins) != 1 or None in begins or len(steps) < len(track.ranks):
            return None
        if number == before + 1 and ends != begins:
            drawn += 1
            where = where or next(iter(steps)).inputs[0].where
    # An epoch's shuffling alone draws once.
    if drawn < _STEPS:
        return None
    return RANDOM.finding(
        f"before {drawn} forwards each rank drew random numbers from numpy's generator, and all "
        "ranks drew the same: noise and augmentation repeat from rank to rank",
        "after the model is built, `np.random.seed(seed + rank)`, if they are meant to differ",
        rank=track.ranks,
        evidence={"forwards": drawn},
        where=where,
    )


def _same_inputs(track: SharedTrack) -> Finding | None:
    seen: list[int] = []
    where: list[Place] = []
    for number in track.numbers[:_LOOKED_AT]:
        inputs = [step.inputs for step in track.steps(number).values()]
        if len(inputs) < len(track.ranks) or any(not i for i in inputs):
            return None
        for at_once in zip(*inputs, strict=False):
            if len({i.hash for i in at_once}) > 1:
                return None
            seen.append(at_once[0].hash)
            where = where or at_once[0].where
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
    for number in track.numbers[:_LOOKED_AT]:
        losses = [[b.loss for b in step.backwards] for step in track.steps(number).values()]
        if any(of_rank != losses[0] for of_rank in losses) or None in losses[0]:
            return False
        seen += losses[0]
    return len(set(seen)) >= _STEPS
