# SPDX-License-Identifier: Apache-2.0
"""What is not the same in the modules that ranks call, beside what their optimizers hold.

The mode of those that are trained; the weights of those that nobody trains and training uses, as a
teacher, a target or a feature extractor; the buffers, such as BatchNorm's statistics, with which
ranks evaluate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from lockstep.audit.rules.base import Code, Rule, at_step, first_of_each, named, numbers
from lockstep.audit.rules.replicas import BEFORE, BETWEEN
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from lockstep.audit.facts import FrozenModule, Step, UsedBuffers
    from lockstep.audit.finding import Finding
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack

_Seen = TypeVar("_Seen")

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


_NORMS_ALLOWED: Final = 1e-6
_SAMPLES_ALLOWED: Final = 1e-5


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
        places = _different([each.prints for each in at_once.values()], first.counts)
        different = [place for place in places if first.names[place] not in held]
        if different:
            return _of_frozen(track, number, at_once, different)
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
    track: SharedTrack, number: int, at_once: dict[int, FrozenModule], different: list[int]
) -> Finding:
    first = next(iter(at_once.values()))
    names = [first.names[place] for place in different]
    norms = {rank: float(each.prints.norms[different[0]]) for rank, each in at_once.items()}
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
    evaluations = [led.evaluations for led in ledgers.values()]
    for at_once in _kth_of_a_kind(evaluations, lambda x: (x.step, *x.names, *x.counts)):
        first = at_once[0]
        at_home = {name.rpartition(".")[0] for t in world.tracks for name in t.at_home}
        different = [
            index
            for index in _different([each.buffers for each in at_once], first.counts)
            if first.names[index].rpartition(".")[0] not in at_home
        ]
        if different:
            names = [first.names[i] for i in different]
            norms = [float(each.buffers.norms[different[0]]) for each in at_once]
            yield BUFFERS.finding(
                f"after step {first.step} the ranks evaluated {first.module} with "
                f"different {named(names)}: each has another model",
                "evaluate through the wrapper (it broadcasts rank 0's buffers), use "
                "SyncBatchNorm, or evaluate on one rank",
                rank=sorted(ledgers),
                optimizer="*",
                step=first.step or None,
                parameters=names,
                evidence={"norms": dict(zip(ledgers, norms, strict=True))},
                where=first.where,
            )
            return


BUFFERS_IN_USE = Rule((BUFFERS,), _look_at_buffers, (World.trains_own_models,))


def _used_in_training(world: World) -> Finding | None:
    """The first buffers that began the same on all ranks, differ, and have gradients follow."""
    if world.is_model_parallel() or not world.in_step:
        return None
    at_home = {name.rpartition(".")[0] for t in world.tracks for name in t.at_home}
    used_buffers = [led.buffers_used for led in world.ledgers.values()]
    for known in _kth_of_a_kind(used_buffers, lambda x: (x.module, *x.names, *x.counts)):
        first = known[0]
        by_step = [dict(zip(each.steps, each.prints, strict=True)) for each in known]
        shared = sorted(set.intersection(*map(set, by_step)))
        used = set.intersection(*(set(each.used or ()) for each in known))
        if not used or not shared or shared[0] != first.steps[0]:
            continue
        began, *later = ([prints[step] for prints in by_step] for step in shared)
        apart = set(_different(began, first.counts))
        for step, prints in zip(shared[1:], later, strict=True):
            different = [
                place
                for place in _different(prints, first.counts)
                if place not in apart
                and first.names[place] in used
                and first.names[place].rpartition(".")[0] not in at_home
            ]
            if different:
                norms = [float(each.norms[different[0]]) for each in prints]
                return _of_used(
                    first, different, dict(zip(world.ledgers, norms, strict=True)), step
                )
    return None


def _of_used(
    buffers: UsedBuffers, different: list[int], norms: dict[int, float], step: int
) -> Finding:
    names = [buffers.names[place] for place in different]
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


def _kth_of_a_kind(
    of_ranks: Sequence[Sequence[_Seen]], kind: Callable[[_Seen], Hashable]
) -> list[tuple[_Seen, ...]]:
    """The k-th of a kind with the k-th of that kind on the other ranks, if all have one.

    Of other sizes modules are of another kind: one rank's head, say.
    """
    by_rank: list[dict[tuple[Hashable, int], _Seen]] = []
    for of_rank in of_ranks:
        counted: Counter[Hashable] = Counter()
        found: dict[tuple[Hashable, int], _Seen] = {}
        for one in of_rank:
            found[kind(one), counted[kind(one)]] = one
            counted[kind(one)] += 1
        by_rank.append(found)
    shared = [known for known in by_rank[0] if all(known in found for found in by_rank)]
    return [tuple(found[known] for found in by_rank) for known in shared]


def _said(norms: dict[int, float]) -> str:
    are_apart = _are_apart(np.array(list(norms.values())), _NORMS_ALLOWED)
    return numbers(norms) if are_apart else "the same, of other elements"


def _different(prints: Sequence[Fingerprint], counts: Sequence[int]) -> list[int]:
    """The places of tensors that are not the same on all ranks, by more than rounding.

    By their sampled elements too: two masks that keep as much of a layer have the same norm, and so
    have two weights that are orthogonal.

    Args:
        counts: so many elements were sampled of each tensor.
    """
    hashes = np.array([each.hashes for each in prints])
    norms = np.array([each.norms for each in prints])
    samples = np.array([each.samples for each in prints])
    bounds = [0, *itertools.accumulate(counts)]
    return [
        place
        for place in map(int, np.flatnonzero((hashes != hashes[0]).any(axis=0)))
        if _are_apart(norms[:, place], _NORMS_ALLOWED)
        or _are_apart(samples[:, bounds[place] : bounds[place + 1]], _SAMPLES_ALLOWED)
    ]


def _are_apart(of_ranks: np.ndarray[Any, Any], allowed: float) -> bool:
    """By more than `allowed` of the largest, or because one is no number."""
    with np.errstate(invalid="ignore"):
        spread = of_ranks.max(axis=0) - of_ranks.min(axis=0)
    return not np.max(spread, initial=0.0) <= allowed * np.abs(of_ranks).max(initial=0.0)
