# SPDX-License-Identifier: Apache-2.0
"""What is not the same in the modules that ranks call, beside what their optimizers hold.

The mode of those that are trained; the weights of those that nobody trains and training uses, as a
teacher, a target or a feature extractor; the buffers, such as BatchNorm's statistics, with which
ranks evaluate.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.prints import are_apart, differing
from lockstep.audit.rules.base import Code, Rule, at_step, first_of_each, named, numbers
from lockstep.audit.rules.replicas import BEFORE, BETWEEN
from lockstep.audit.shared_track import side_by_side
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from lockstep.audit.facts import Evaluation, FrozenModule, Step, UsedBuffers
    from lockstep.audit.finding import Finding
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack

MODE = Code("LS311", "ranks train in different modes")


def _look_at_modes(world: World) -> Iterable[Finding]:
    """Compares `training` of the parts of the module that each rank's backward was about."""
    # The module is one, however many optimizers step its parameters.
    return itertools.islice(first_of_each(world.compared, _mode_at_step), 1)


MODES = Rule((MODE,), _look_at_modes)


def _mode_at_step(track: SharedTrack, number: int) -> Finding | None:
    modes = {rank: step.mode for rank, step in track.steps(number).items() if step.mode is not None}
    alike = {(m.module, m.parts) for m in modes.values()}
    if len(modes) < len(track.ranks) or len(alike) > 1:
        return None
    if len({m.flags for m in modes.values()}) == 1:
        return None
    name, parts = alike.pop()
    trained = {rank: mode.training for rank, mode in modes.items()}
    counts = ", ".join(f"{count} of {parts} on rank {rank}" for rank, count in trained.items())
    return MODE.finding(
        f"step {number + 1}: parts of {name} that were in training mode: {counts}. Dropout and "
        "BatchNorm do not do the same on all ranks",
        "call `model.train()` on every rank after an evaluation, also where one rank evaluates",
        evidence={"training": trained, "parts": parts},
        **at_step(track, number, where=next(iter(modes.values())).where),
    )


def _look_at_frozen(world: World) -> Iterable[Finding]:
    """Compares what all ranks called in a step and no optimizer holds."""
    for found in itertools.islice(first_of_each(world.in_step, _frozen_at_step), 1):
        # Where the replicas themselves differ, what follows them does too.
        yield replace(found, optimizer="*")


FROZEN = Rule((BEFORE, BETWEEN), _look_at_frozen, (World.is_model_parallel,))


def _frozen_at_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    if len(steps) < len(track.ranks):
        return None
    for at_once in _side_by_side(steps):
        first = next(iter(at_once.values()))
        # What an optimizer holds or held on a rank is compared at its steps.
        held = {name for each in at_once.values() for name in each.held}
        prints = {rank: each.prints for rank, each in at_once.items()}
        names, norms = _names_and_norms(first, prints, held)
        if names:
            return _of_frozen(track, number, first, names, norms)
    return None


def _side_by_side(steps: dict[int, Step]) -> list[dict[int, FrozenModule]]:
    """The k-th module of a kind that each rank called, if all called as many of that kind.

    Not where all called the same modules, each in an order of its own.
    """
    found = []
    first = next(iter(steps.values()))
    for key in dict.fromkeys(each.key for each in first.frozen):
        alike = {r: [f for f in step.frozen if f.key == key] for r, step in steps.items()}
        as_many = len({len(modules) for modules in alike.values()}) == 1
        if as_many and len({_whatever_order(modules) for modules in alike.values()}) > 1:
            found += [
                dict(zip(alike, at_once, strict=True))
                for at_once in zip(*alike.values(), strict=True)
            ]
    return found


def _whatever_order(modules: list[FrozenModule]) -> tuple[bytes, ...]:
    return tuple(sorted(each.prints.hashes.tobytes() for each in modules))


def _of_frozen(
    track: SharedTrack,
    number: int,
    first: FrozenModule,
    names: list[str],
    norms: dict[int, float],
) -> Finding:
    since = number > track.numbers[0]
    code = BETWEEN if since else BEFORE
    when = f"by step {number + 1}" if since else "at the first step"
    return code.finding(
        f"{when} the ranks called {first.module} modules that no optimizer trains and whose "
        f"weights differ: {named(names)} (norm of `{names[0]}`: {_said(norms)})",
        "build, load and update it on every rank alike: nothing else makes it the same. If it is "
        "meant to differ, `lockstep.local(module)`",
        parameters=names,
        evidence={"norms": norms},
        **at_step(track, number, where=first.where),
    )


BUFFERS = Code("LS309", "ranks compute with different buffers")


def _look_at_buffers(world: World) -> Iterable[Finding]:
    """Compares the buffers that gradients follow from, and those of an evaluation.

    Others differ in healthy runs.
    """
    ledgers = world.ledgers
    if len(ledgers) < 2:
        return
    in_training = _used_in_training(world)
    if in_training is not None:
        yield in_training
        return
    evaluations = {rank: led.evaluations for rank, led in ledgers.items()}
    for at_once in side_by_side(evaluations, lambda x: (x.step, *x.names, *x.counts)):
        first = at_once[min(at_once)]
        prints = {rank: each.buffers for rank, each in at_once.items()}
        names, norms = _names_and_norms(first, prints, _in_layers_at_home(world, first.names))
        if names and len(at_once) == len(ledgers):
            yield BUFFERS.finding(
                f"after step {first.step} the ranks evaluated {first.module} with "
                f"different {named(names)}: each has another model",
                "evaluate through the wrapper (it broadcasts rank 0's buffers), use "
                "SyncBatchNorm, or evaluate on one rank",
                rank=sorted(ledgers),
                optimizer="*",
                step=first.step or None,
                parameters=names,
                evidence={"norms": norms},
                where=first.where,
            )
            return


BUFFERS_IN_USE = Rule((BUFFERS,), _look_at_buffers, (World.trains_own_models,))


def _used_in_training(world: World) -> Finding | None:
    """The first buffers that differ since ranks have changed them, if gradients follow from them;
    or that differ from the beginning and never change, as random features that a rank has drawn."""
    if world.is_model_parallel() or not world.in_step:
        return None
    used_buffers = {rank: led.buffers_used for rank, led in world.ledgers.items()}
    for known in side_by_side(used_buffers, lambda x: (x.module, *x.names, *x.counts)):
        first = known[min(known)]
        by_step = {r: dict(zip(each.steps, each.prints, strict=True)) for r, each in known.items()}
        shared = sorted(set.intersection(*map(set, by_step.values())))
        used = set.intersection(*(set(each.used or ()) for each in known.values()))
        if len(known) < len(world.ledgers) or not shared or shared[0] != first.steps[0]:
            continue
        began, *later = ({r: of_rank[step] for r, of_rank in by_step.items()} for step in shared)
        at_home = _in_layers_at_home(world, first.names)
        # A single number may be the rank's own, or a count.
        single = {n for n, count in zip(first.names, first.counts, strict=True) if count < 2}
        drawn, norms = _names_and_norms(first, began, at_home | single)
        if drawn and first.trains and not any(map(_ever_changes, known.values())):
            return _of_constant(first, drawn, norms)
        apart, _ = _names_and_norms(first, began, ())
        leave_out = {*apart, *set(first.names) - used, *at_home}
        for step, prints in zip(shared[1:], later, strict=True):
            names, norms = _names_and_norms(first, prints, leave_out)
            if names:
                return _of_used(first, names, norms, step)
    return None


def _ever_changes(buffers: UsedBuffers) -> bool:
    """Were other numbers written to them, and not the same ones again, as when weights are swapped
    for an evaluation?"""
    return len({tuple(prints.hashes.tolist()) for prints in buffers.prints}) > 1


def _of_constant(buffers: UsedBuffers, names: list[str], norms: dict[int, float]) -> Finding:
    return BUFFERS.finding(
        f"the ranks train the same {buffers.module} with different {named(names)} from the first "
        f"step on (norm of `{names[0]}`: {_said(norms)}): where its forward uses them, each rank's "
        "gradient is that of another model",
        "draw it from a generator with one seed on all ranks, or let DistributedDataParallel send "
        "rank 0's (broadcast_buffers=True). If it is meant to differ, `lockstep.local(module)`",
        severity="warning",  # whether the forward uses them was not looked at
        rank=sorted(norms),
        optimizer="*",
        step=1,
        parameters=names,
        evidence={"norms": norms},
        where=buffers.where,
    )


def _of_used(buffers: UsedBuffers, names: list[str], norms: dict[int, float], step: int) -> Finding:
    return BUFFERS.finding(
        f"the ranks began with the same {named(names)} of {buffers.module} and compute step "
        f"{step + 1} with different ones (norm of `{names[0]}`: {_said(norms)}): training uses "
        "what each rank has updated by itself",
        "all-reduce what the buffer is updated with, or broadcast the buffer, on every rank before "
        "a forward uses it. If it is meant to differ, `lockstep.local(module)`",
        rank=sorted(norms),
        optimizer="*",
        step=step + 1,
        parameters=names,
        evidence={"norms": norms},
        where=buffers.where,
    )


def _names_and_norms(
    first: FrozenModule | Evaluation | UsedBuffers,
    prints: dict[int, Fingerprint],
    leave_out: Container[str],
) -> tuple[list[str], dict[int, float]]:
    """The names of those tensors that differ, but for some, and the norms of the first of them."""
    places = differing(list(prints.values()), first.counts)
    different = [place for place in places if first.names[place] not in leave_out]
    norms = {
        rank: float(each.norms[place]) for place in different[:1] for rank, each in prints.items()
    }
    return [first.names[place] for place in different], norms


def _in_layers_at_home(world: World, names: Iterable[str]) -> set[str]:
    """Those of `names` whose layers have weights of each rank's own: as found, or as declared."""
    own = {name for track in world.tracks for name in track.at_home}
    held = [p for led in world.ledgers.values() for track in led.tracks for p in track.parameters]
    layers = {name.rpartition(".")[0] for name in (*own, *(p.name for p in held if p.local))}
    return {name for name in names if name.rpartition(".")[0] in layers}


def _said(norms: dict[int, float]) -> str:
    return (
        numbers(norms)
        if are_apart(np.array(list(norms.values())))
        else "the same, of other elements"
    )
