# SPDX-License-Identifier: Apache-2.0
"""Why gradients differ: what each rank did between two steps, told apart by what was counted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lockstep.audit.ledger import ADDING_UP, REDUCING
from lockstep.audit.rules.base import named
from lockstep.audit.rules.left_by_backward import left_by
from lockstep.audit.shared_track import names_of

if TYPE_CHECKING:
    from lockstep.audit.facts import Backward, ReducerUse, Step
    from lockstep.audit.finding import Place
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


@dataclass(frozen=True)
class Reason:
    """In a word, in a sentence, and what to type."""

    name: str
    text: str
    fix: str
    kind: Literal["bypassed", "unknown", "after", "mixed", "scales"] = "bypassed"
    where: list[Place] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)


def reason_of(world: World, track: SharedTrack, number: int, names: set[str]) -> Reason:
    """What rank by rank was seen in the step; the first rank that tells something counts."""
    steps = track.steps(number)
    step = next(iter(steps.values()))
    wrapped = [p for p in track.parameters if p.name in names and p.wrapper]
    unwrapped = sorted(names - {p.name for p in wrapped})
    held = Counter(p.name for t in track.tracks.values() for p in t.parameters)
    others = {name for name, count in held.items() if count > 1} - names
    if step.inside_backward:
        return Reason(
            "stepped inside backward",
            "the optimizer stepped inside backward, before the gradients had been reduced",
            "step after backward has returned",
        )
    if not wrapped:
        return _without_wrapper(world, track, step, unwrapped, bool(others))
    if unwrapped and others:
        return _unknown(unwrapped, "are not among the parameters that the wrapper was built with")
    key = wrapped[0].wrapper
    assert key is not None
    for candidate in steps.values():
        seen = [(b, use) for b in candidate.backwards if (use := b.wrappers.get(key)) is not None]
        found = _with_wrapper(track, candidate, seen)
        if found is not None:
            uses = [asdict(use) for _, use in seen]
            return replace(found, evidence={"backwards": uses, **found.evidence})
    return _after(world, track, number, step)


def _without_wrapper(
    world: World, track: SharedTrack, step: Step, names: list[str], others: bool
) -> Reason:
    reduced = {c.parameter for c in step.collectives if c.op in REDUCING and c.parameter}
    held = {p.name: math.prod(p.shape) for t in track.tracks.values() for p in t.parameters}
    if not reduced & set(names) and _went_flat(step, sum(held.values())):
        return _after(world, track, step.number, step)
    if (others or reduced - set(held)) and set(names) - reduced and _reduces(track, step):
        return _unknown(names, "passed no reduction, and the others did")
    if reduced & set(names):
        return _after(world, track, step.number, step)
    sizes = [c for c in step.collectives if c.op in REDUCING and c.shape]
    if any(p.is_alone for p in track.parameters if p.name in names):
        return Reason(
            "group too small",
            "they are sharded over a mesh of one rank, and nothing reduces them over the others",
            "give `fully_shard` the whole mesh: one with a dimension that replicates and one that "
            "shards is hybrid sharding",
        )
    if any(c.shape != [1] for c in sizes) and _written_since_backward(track, step):
        return _after(world, track, step.number, step)
    if any(len(b.wrappers) for b in step.backwards) and not sizes:
        return _unknown(names, "belong to no wrapper")
    if world.sync_of_lockstep():
        return _after(world, track, step.number, step)
    return Reason(
        "no reduction",
        f"no collective touched them between two steps ({len(step.backwards)} backwards, "
        f"{len(step.collectives)} collectives called from Python, no wrapper)",
        "wrap the model in DistributedDataParallel and call the wrapper, or call "
        "`gradients = lockstep.replicate(model)` once after it is built",
    )


def _reduces(track: SharedTrack, step: Step) -> bool:
    """Is anything reduced at all? Gradients that are equal unreduced may all be zero."""
    parameters = [p for t in track.tracks.values() for p in t.parameters]
    adds = [c for c in step.collectives if c.op in ADDING_UP]
    known = any(p.wrapper or p.sharded for p in parameters)
    return known or any(c.parameter or math.prod(c.shape) > 1 for c in adds)


def _went_flat(step: Step, size: int) -> bool:
    """Were tensors added up that are as large as all of the optimizer's parameters together?"""
    sums = [c for c in step.collectives if c.op in REDUCING and not c.parameter]
    sizes = [math.prod(c.shape) for c in sums if c.shape]
    return size > 1 and (size in sizes or sum(n for n in sizes if n > 1) == size)


def _written_since_backward(track: SharedTrack, step: Step) -> bool:
    """Are this rank's gradients no multiple of what backward left, as after a sum that is flat?"""
    last, used = left_by(step, track.key), step.gradients
    if last is None or used is None or step.clips or len(last.samples) != len(used.samples):
        return False
    there = np.isfinite(last.samples) & np.isfinite(used.samples)
    then, now = last.samples[there], used.samples[there]
    if not then.any() or not now.any():
        return False
    factor = float(then @ now) / float(then @ then)
    return bool(np.abs(now - factor * then).max() > 1e-3 * np.abs(now).max())


def _unknown(names: list[str], what: str) -> Reason:
    return Reason(
        "parameter unknown to the reducer",
        f"{named(names)} {what}",
        "build and unfreeze the whole model before it is wrapped (wrap it anew after a change), "
        "or `lockstep.replicate(model)` after the last change; mark what differs by design: "
        "`lockstep.local(module)`",
        kind="unknown",
    )


def _with_wrapper(
    track: SharedTrack, step: Step, seen: list[tuple[Backward, ReducerUse]]
) -> Reason | None:
    if any(f.group == 1 for _, f in seen):
        return Reason(
            "group too small",
            "the wrapper reduces over a process group of one rank",
            "give the wrapper the group of all data-parallel ranks, or none",
        )
    if not seen or all(b.kind == "grad" for b, _ in seen):
        return Reason(
            "autograd.grad",
            "they did not come from `backward()`: torch.autograd.grad runs no reducer",
            "call `loss.backward()`, or `lockstep.average_gradients(model)` before the step",
            where=[place for b in step.backwards[-1:] for place in b.where],
        )
    last_backward, last = seen[-1]
    if last.no_sync:
        return _wrong_window(last_backward, "the last backward before the step ran")
    went_round = [place for lines in step.bypasses for place in lines]
    if not any(f.armed for _, f in seen):
        if any(f.no_sync for _, f in seen):
            return _wrong_window(last_backward, "every forward of this window ran")
        return _not_called(went_round, sum(use.issued for _, use in seen))
    if all(f.issued == 0 for _, f in seen if f.armed):
        return _unfinished(track, step, last_backward)
    if not last.armed or last.issued == 0:
        return Reason(
            "a backward outside the wrapper",
            f"{len(seen)} backwards filled them and the reducer ran in an earlier one; the last "
            "one's forward did not go through the wrapper, or its reduction was over",
            "add the losses and call backward once, with every forward through the wrapper, or "
            "`lockstep.replicate(model)`, which reduces after the last",
            where=[*went_round, *last_backward.where],
        )
    return None


def _wrong_window(backward: Backward, what: str) -> Reason:
    return Reason(
        "wrong window",
        f"{what} under no_sync(), so what it added was never reduced",
        "leave no_sync() for the last micro-batch before each step: "
        "`if (i + 1) % k == 0` synchronises",
        where=backward.where,
    )


def _not_called(went_round: list[Place], issued: int) -> Reason:
    at = f" (it went round it at {went_round[0].at})" if went_round else ""
    # Of the nested lines, the outermost that the model's own class does not hold says most.
    return Reason(
        "wrapper not called",
        f"the forward did not go through the wrapper{at}; its process group saw {issued} "
        "collectives during backward",
        "call the wrapper: `model(batch)`, not `model.module.compute_loss(batch)` (give the "
        "module a `forward` that does it), or `lockstep.replicate(model)` instead of the wrapper, "
        "which synchronises the parameters whatever is called",
        where=went_round,
    )


def _unfinished(track: SharedTrack, step: Step, backward: Backward) -> Reason:
    unused = [
        p.name
        for p in track.parameters
        for rank, index in p.index.items()
        if step.gradients is not None
        and track.step(rank, step.number) is step
        and step.gradients.is_absent(index)
    ]
    because = f": {named(unused)} had no gradient, and it waited for it" if unused else ""
    return Reason(
        "the reducer did not run",
        f"the wrapper was called, and its reducer issued no collective during backward{because}",
        "DistributedDataParallel(find_unused_parameters=True), or take what is unused out of the "
        "model",
        where=backward.where,
        evidence={"unused": unused},
    )


def _after(world: World, track: SharedTrack, number: int, step: Step) -> Reason:
    """A reduction ran; were they equal when backward had returned?"""
    handed_back = _handed_back(track, number)
    if handed_back:
        return _unknown(handed_back, "came back from the wrapper's communication hook as they were")
    scales = {r: s.scale for r, s in track.steps(number).items() if s.scale is not None}
    if len(set(scales.values())) > 1:
        return Reason(
            "another loss scale",
            f"the ranks scaled their losses by different numbers ({scales})",
            "make one GradScaler on every rank at the same time with the same arguments, and let "
            "all ranks agree on found_inf",
            kind="scales",
            evidence={"scales": scales},
        )
    by_lockstep = world.sync_of_lockstep()
    if by_lockstep or _equal_after_backward(track, number):
        return Reason(
            "overwritten after the reduction",
            "lockstep reduced them, or the step would have been refused: they were changed after "
            "that"
            if by_lockstep
            else "they were equal on all ranks when backward had returned, and were changed after "
            "that",
            "change gradients in the same way on every rank, from the same numbers",
            kind="after",
        )
    return _in_another_order(track) or Reason(
        "unknown",
        "collectives ran between backward and the step, and still they differ",
        "compare what is reduced with what the optimizer holds, at the lines above",
        kind="after",
    )


def _handed_back(track: SharedTrack, number: int) -> list[str]:
    """Gradients that differ, and that the reduction gave back as the last backward brought them."""
    names = set(names_of(track.differences("gradients", number)))
    steps = track.steps(number)
    last = {r: s.backwards[-1].local.get(track.key) for r, s in steps.items() if s.backwards}
    found = []
    for shared in track.parameters:
        places = {rank: track.samples_at(shared, rank) for rank in steps}
        if (
            shared.wrapper
            and shared.name in names
            and all(
                own is not None
                and used is not None
                and np.array_equal(own.samples[places[rank]], used.samples[places[rank]])
                for rank, own in last.items()
                for used in (steps[rank].gradients,)
            )
        ):
            found.append(shared.name)
    return found if last and len(found) == len(names) else []


def _in_another_order(track: SharedTrack) -> Reason | None:
    """A wrapper pairs parameters by their places, and these are at others on some ranks."""
    wrapped = [p for p in track.parameters if p.wrapper and len(p.index) == len(track.ranks)]
    orders = [
        [p.name for p in sorted(wrapped, key=lambda p: p.index[rank])] for rank in track.ranks
    ]
    for at_once in zip(*orders, strict=True):
        names = dict(zip(track.ranks, at_once, strict=True))
        if len(set(names.values())) > 1:
            listed = ", ".join(f"`{name}` on rank {rank}" for rank, name in names.items())
            return Reason(
                "paired by position",
                "the ranks hold their parameters in different orders, and the wrapper adds up what "
                f"is at the same place: {listed}",
                "build the model in the same order on every rank: sort what its parts are made "
                "from, such as files and sets",
                kind="mixed",
                evidence={"paired": names},
            )
    return None


def _equal_after_backward(track: SharedTrack, number: int) -> bool:
    left = {rank: left_by(step, track.key) for rank, step in track.steps(number).items()}
    prints = {rank: gradients for rank, gradients in left.items() if gradients is not None}
    if len(prints) < len(left):
        return False
    for shared in track.parameters:
        hashes = {int(p.hashes[shared.index[r]]) for r, p in prints.items() if r in shared.index}
        if len(hashes) > 1:
            return False
    return len(prints) > 1
