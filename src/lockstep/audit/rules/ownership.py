# SPDX-License-Identifier: Apache-2.0
"""Whose parameters does the optimizer hold, and did the processes train one model?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lockstep.audit import exit_codes
from lockstep.audit.rules.base import Code, Rule, named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Step, Track
    from lockstep.audit.finding import Finding
    from lockstep.audit.world import World

FOREIGN = Code("LS401", "the optimizer holds parameters that are not the model's")
UNOWNED = Code("LS402", "gradients that no optimizer owns", "notice")
APART = Code("LS404", "the processes never met", "warning")
STEPLESS = Code("LS405", "no optimizer step was seen", "notice")
BLIND = Code(exit_codes.BLIND, "the audit could not look", "notice")


def _look(world: World) -> Iterable[Finding]:
    """Looks at each rank alone."""
    seen: set[str] = set()
    for rank, ledger in world.ledgers.items():
        for track in ledger.tracks:
            found = _foreign(rank, track) or _unowned(world, rank, track)
            found = found or _unfrozen(world, rank, track)
            if found is not None and found.code + track.key not in seen:
                seen.add(found.code + track.key)
                yield found


OWNERSHIP = Rule((FOREIGN, UNOWNED), _look)


def _foreign(rank: int, track: Track) -> Finding | None:
    """Never a gradient for what it holds, while a twin of the same shape has one."""
    steps = [s for s in track.steps if s.gradients is not None]
    if not steps or track.count == 0:
        return None
    without = [
        place
        for place in range(len(track.parameters))
        if all(s.gradients is not None and s.gradients.is_absent(place) for s in steps)
    ]
    unowned = [entry.rsplit(" [", maxsplit=1) for step in steps for entry in step.unowned]
    twins = {"[" + shape for _, shape in unowned}
    foreign = [
        track.parameters[place]
        for place in without
        if str(track.parameters[place].shape) in twins
        and (not track.parameters[place].in_module or len(without) == len(track.parameters))
    ]
    if not foreign:
        return None
    with_gradient = sorted({name for name, _ in unowned})
    return FOREIGN.finding(
        f"{track.optimizer} holds {len(foreign)} parameters ({named([p.name for p in foreign])}) "
        f"that never had a gradient, while {named(with_gradient)}, of the same shapes, had "
        "gradients that no optimizer holds: the model that is trained is not the one that was "
        "handed to the optimizer",
        "make the optimizer after the model was copied, moved, converted or rebuilt: "
        "`optimizer = Optim(model.parameters())` as the last thing",
        rank=[rank],
        step=steps[0].number + 1,
        parameters=[p.name for p in foreign],
        evidence={"with_gradient": with_gradient},
        where=[*track.where, *steps[0].where],
    )


def _unowned(world: World, rank: int, track: Track) -> Finding | None:
    """Everything held is fine; something else was differentiated for nothing."""
    if not track.steps or not track.steps[0].unowned:
        return None
    step = track.steps[0]
    trained = _moved(track)
    # Held by another optimizer, or by one that is gone: as a client's, of a round.
    every = (track for led in world.ledgers.values() for track in led.tracks)
    names = [name for name in _held_by_none(step, every) if name not in trained]
    if not names:
        return None
    others = [] if step.beside is None else step.beside.left_out
    left_out = [n for n in names if n in others]
    beside = ", while others of their model are held" if left_out else ""
    names = left_out or names
    return UNOWNED.finding(
        f"{named(names)} had gradients at {track.optimizer}'s first step, and no optimizer holds "
        f"them{beside}: they do not train",
        "add them to an optimizer, or `requires_grad_(False)` if they are meant to stay",
        severity="warning" if left_out else "notice",
        rank=[rank],
        step=1,
        parameters=names,
        where=track.where,
    )


def _held_by_none(step: Step, tracks: Iterable[Track]) -> list[str]:
    held = {p.name for track in tracks for p in track.parameters}
    names = [entry.rsplit(" [", maxsplit=1)[0] for entry in step.unowned]
    return [name for name in names if name not in held]


def _unfrozen(world: World, rank: int, track: Track) -> Finding | None:
    """Weights that the program has unfrozen, which it would not do if they were to stay."""
    later = next((step for step in track.steps if step.number and step.unowned), None)
    if later is None:
        return None
    # What has trained them before they were frozen does not train them now.
    since = itertools.dropwhile(lambda one: one is not track, world.ledgers[rank].tracks)
    names = _held_by_none(later, since)
    if not names:
        return None
    return UNOWNED.finding(
        f"{named(names)} were frozen at {track.optimizer}'s first step and had gradients by step "
        f"{later.number + 1}, and no optimizer holds them: unfrozen, they still do not train",
        "add them to the optimizer (`add_param_group`), or make a new one, where they are unfrozen",
        severity="warning",
        rank=[rank],
        step=later.number + 1,
        parameters=names,
        where=[*track.where, *later.where],
    )


def _moved(track: Track) -> set[str]:
    """What changed in one of the first steps, although no optimizer holds it: copies are held."""
    seen = [step.beside for step in track.steps if step.beside is not None]
    moved: set[str] = set()
    for before, after in itertools.pairwise(seen):
        then = dict(zip(before.names, before.weights.hashes.tolist(), strict=True))
        now = dict(zip(after.names, after.weights.hashes.tolist(), strict=True))
        moved |= {name for name, held in now.items() if then.get(name, held) != held}
    return moved


def _look_at_participation(world: World) -> Iterable[Finding]:
    """Did the processes of this run train one model, and was the audit there?"""
    if any(f.blind for f in world.facts):
        yield _blind(world)
    elif not world.has_failed():
        yield from _met(world)


PARTICIPATION = Rule((BLIND, APART, STEPLESS), _look_at_participation)


def _met(world: World) -> Iterable[Finding]:
    trained = {
        r: led for r, led in world.ledgers.items() if any(track.count for track in led.tracks)
    }
    # Processes that the script started may train one model, each for itself (Hogwild).
    shared = any(led.facts.shares_memory for led in trained.values())
    backwards = sum(led.facts.backwards for led in world.ledgers.values())
    made = any(led.tracks for led in world.ledgers.values())
    if not trained and backwards and (any(f.fullgraph for f in world.facts) or not made):
        yield _unseen(world, backwards)
    elif not trained and any(f.unwatched for f in world.facts):
        yield _unwatched(world)
    elif not trained:
        yield STEPLESS.finding(
            "no step of a torch optimizer was seen, so there is nothing to compare: "
            + ("none stepped of those that were made" if made else "no backward ran either"),
            "audit a script that trains; for ranks that the script starts itself use "
            "`--nproc-per-node 1`",
            evidence={"backwards": backwards},
        )
    elif world.size > 1 and not world.started_group and not shared:
        yield APART.finding(
            f"{len(trained)} of {world.size} processes trained and none started a process "
            "group: each trained a model of its own, and nothing ties them together",
            "call torch.distributed.init_process_group() and synchronise the gradients, or "
            "start the script with one process",
            rank=sorted(trained),
            where=next(t.where for led in trained.values() for t in led.tracks),
        )


def _blind(world: World) -> Finding:
    blind = {rank: led.facts.blind for rank, led in world.ledgers.items() if led.facts.blind}
    return BLIND.finding(
        f"{next(iter(blind.values()))}: what was trained there is not known, and was not compared",
        "import torch in the script itself, by `import torch`; start processes that train with "
        "multiprocessing, and let them come to their end, or audit what they run",
        rank=sorted(blind),
        where=next((facts.blind_at for facts in world.facts if facts.blind_at), []),
    )


def _unseen(world: World, backwards: int) -> Finding:
    """The audit was there, and the step was none that it sees."""
    why = (
        "its step is compiled with fullgraph=True, where nothing can look in"
        if any(f.fullgraph for f in world.facts)
        else "weights that are changed by hand, or by an optimizer that does not derive from "
        "torch.optim.Optimizer, are not watched"
    )
    return BLIND.finding(
        f"{backwards} backwards ran and no step of a torch optimizer was seen, so that nothing was "
        f"compared: {why}",
        "derive the optimizer from torch.optim.Optimizer, or compile its step without fullgraph; "
        "`--fail-on never` for a script that asks for gradients and trains nothing",
        rank=world.ranks,
        evidence={"backwards": backwards},
    )


def _unwatched(world: World) -> Finding:
    """No process that was watched trained: if any did, it was one of these."""
    started = [each for facts in world.facts for each in facts.unwatched]
    ways = ", ".join(dict.fromkeys(f"`{each.by}`" for each in started))
    return BLIND.finding(
        f"the script started Python by {ways}, which is not watched, and nothing was trained in "
        "the processes that are",
        "audit what they run: put `lockstep audit` into that command, or "
        "`-m lockstep.audit` behind its launcher",
        rank=[rank for rank, led in world.ledgers.items() if led.facts.unwatched],
        where=[place for each in started for place in each.where],
    )
