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
from lockstep.audit.ledger import ADDING_UP
from lockstep.audit.rules.base import Code, Rule
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.audit.facts import Draws, Step
    from lockstep.audit.finding import Finding, Place, Severity
    from lockstep.audit.shared_track import SharedTrack

RANDOM = Code("LS507", "the same random numbers on all ranks", "notice")
INPUTS = Code("LS508", "the same inputs on all ranks", "notice")

_STEPS = 3
_LOOKED_AT = 16
_NUMBERS = 8
"""A few may agree by chance, or for other reasons."""


def _look(world: World) -> Iterable[Finding]:
    """Compares what was drawn and the models' inputs, step by step."""
    for track in world.compared:
        noise = _same_draws(track) or _same_draws_of_numpy(track)
        found = [f for f in (noise, _same_inputs(track)) if f is not None]
        yield from (replace(f, optimizer=track.first.key_of_all) for f in found)
        if found:
            return


REPETITION = Rule((RANDOM, INPUTS), _look, (World.is_model_parallel, World.sync_of_lockstep))


def _same_draws(track: SharedTrack) -> Finding | None:
    """A line that draws for each sample of a batch, the same on all ranks and new in each step."""
    by_line: dict[Place, list[list[Draws]]] = {}
    looked_at: list[Step] = []
    for number in track.numbers[:_LOOKED_AT]:
        steps = list(track.steps(number).values())
        of_ranks = [{drawn.where[0]: drawn for drawn in step.draws} for step in steps]
        if len(steps) < len(track.ranks) or _shared_losses(steps) is not None:
            continue
        looked_at += steps
        for line in of_ranks[0]:
            if all(line in of_rank for of_rank in of_ranks):
                by_line.setdefault(line, []).append([of_rank[line] for of_rank in of_ranks])
    found: list[Finding] = []
    for at_once in by_line.values():
        hashes = [{drawn.hash for drawn in of_ranks} for of_ranks in at_once]
        is_same = all(len(of_step) == 1 for of_step in hashes)
        if not is_same or len(set.union(*hashes)) < max(_STEPS, len(at_once)):
            continue
        severity = _gravity(track, at_once[0][0], looked_at)
        if severity is not None:
            found.append(_drawn_alike(track, at_once[0][0], len(at_once), severity))
    return max(found, key=lambda one: SEVERITIES.index(one.severity), default=None)


def _goes_into(drawn: list[int], shape: list[int]) -> bool:
    """Can all of `drawn` have been added to a tensor of that shape, sample by sample?"""
    pairs = itertools.zip_longest(drawn[1:], shape[1:], fillvalue=1)
    return drawn[:1] == shape[:1] != [] and all(n in (1, whole) for n, whole in pairs)


def _gravity(track: SharedTrack, drawn: Draws, steps: Sequence[Step]) -> Severity | None:
    """Was a row drawn for each sample, or a tensor for each? None if that is not evident.

    Noise for weights has their shapes. Ranks may take the same places of data of their own on
    purpose, and decide together what becomes of a layer. What a model draws within is for the
    samples that it was given; what is drawn when it has been called may be for something else, as
    is what has rows in a call whose tensors do not agree on how many samples there are.
    """
    if any(drawn.shape == p.shape for held in track.held for p in held.described.values()):
        return None
    calls = [s for step in steps for s in (step.fed_shapes, *(each.shapes for each in step.inputs))]
    rows = {shape[0] for shapes in calls for shape in shapes if shape}
    if math.prod(drawn.shape) >= _NUMBERS:
        # Of numbers for all ranks, for whole sequences or pictures each rank may take a part.
        met = [shapes for shapes in calls if any(_goes_into(drawn.shape, s) for s in shapes)]
        within = drawn.when == "within" and drawn.shape[0] in rows
        agreed = any(len({s[0] for s in shapes if s}) == 1 for shapes in met)
        if within or (agreed and drawn.when == "before"):
            return "warning" if "float" in drawn.dtype else "notice"
        if met:
            return "notice"
    batches = max(1, *(len(step.backwards) for step in steps))
    each = any(n > 1 and drawn.count == n * batches for n in rows)
    return "notice" if each else None


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


def _shared_losses(steps: Iterable[Step]) -> list[float | None] | None:
    """What all ranks computed, to the bit; None where they differ."""
    losses = [[backward.loss for backward in step.backwards] for step in steps]
    return losses[0] if all(of_rank == losses[0] for of_rank in losses) else None


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
    """Inputs of the wrappers, the same on all ranks and others in each step.

    In a program without wrappers: what a step's first module was given, if the losses are the same
    and the ranks add something up. Ranks that add nothing up each do the same work on purpose, as a
    warm start from one seed.
    """
    seen: list[int] = []
    where: list[Place] = []
    by_wrappers, adds_up = True, False
    for number in track.numbers[:_LOOKED_AT]:
        steps = list(track.steps(number).values())
        inputs = [[i.hash for i in step.inputs] for step in steps]
        by_wrappers = by_wrappers and all(inputs)
        given = inputs if by_wrappers else [[step.fed] for step in steps]
        at_once = [{*hashes} for hashes in zip(*given, strict=False)]
        if len(steps) < len(track.ranks) or any(len(of_call) > 1 for of_call in at_once):
            return None
        seen += [hash for of_call in at_once for hash in of_call if hash is not None]
        where = where or (steps[0].inputs[0].where if by_wrappers else steps[0].where)
        adds_up = adds_up or any(c.op in ADDING_UP for step in steps for c in step.collectives)
    same_losses = _same_losses(track)
    if len(set(seen)) < _STEPS or not (by_wrappers or (same_losses and adds_up)):
        return None
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
    """Are they the same, and change? Then what is averaged was the same before."""
    seen: list[float | None] = []
    for number in track.numbers[:_LOOKED_AT]:
        losses = _shared_losses(track.steps(number).values())
        if losses is None or None in losses:
            return False
        seen += losses
    return len(set(seen)) >= _STEPS
