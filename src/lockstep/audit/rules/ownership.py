# SPDX-License-Identifier: Apache-2.0
"""Whose parameters does the optimizer hold, and did the processes train one model?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, Explained, named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Ledger, Track
    from lockstep.audit.world import World

FOREIGN = Code("LS401", "the optimizer holds parameters that are not the model's")
UNOWNED = Code("LS402", "gradients that no optimizer owns", "notice")
APART = Code("LS404", "the processes never met", "warning")
STEPLESS = Code("LS405", "no optimizer step was seen", "notice")
BLIND = Code("LS406", "the audit could not look")


class Ownership:
    """Looks at each rank alone."""

    codes = (FOREIGN, UNOWNED)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        seen: set[str] = set()
        for rank, ledger in world.ledgers.items():
            for track in ledger.tracks:
                found = _foreign(rank, track) or _unowned(world, rank, track)
                if found is not None and found.code + track.key not in seen:
                    seen.add(found.code + track.key)
                    yield found


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
    moved = _moved(track)
    names = [entry.rsplit(" [", maxsplit=1)[0] for entry in step.unowned]
    names = [name for name in names if name not in moved]
    if not names:
        return None
    held = {p.name for led in world.ledgers.values() for t in led.tracks for p in t.parameters}
    left_out = [n for n in names if n in step.beside.get("left_out", ()) and n not in held]
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


def _moved(track: Track) -> set[str]:
    """What changed in one of the first steps, although no optimizer holds it: copies are held."""
    seen = [step.beside for step in track.steps if step.beside]
    moved: set[str] = set()
    for before, after in itertools.pairwise(seen):
        then = dict(zip(before["names"], before["weights"].hashes.tolist(), strict=True))
        now = dict(zip(after["names"], after["weights"].hashes.tolist(), strict=True))
        moved |= {name for name, held in now.items() if then.get(name, held) != held}
    return moved


class Participation:
    """Did the processes of this run train one model, and was the audit there?"""

    codes = (BLIND, APART, STEPLESS)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        blind = {rank: why for rank, why in enumerate(world.fact("blind")) if why}
        if blind:
            yield _blind(world, blind)
        elif not world.has_failed:
            yield from self._met(world)

    def _met(self, world: World) -> Iterable[Finding]:
        trained = {r: led for r, led in world.ledgers.items() if _steps(led)}
        if not trained:
            backwards = sum(led.facts.get("backwards", 0) for led in world.ledgers.values())
            why = (
                "no backward ran either"
                if not backwards
                else "its step is compiled with fullgraph=True, where nothing can look in"
                if any(world.fact("fullgraph"))
                else f"{backwards} backwards ran; an optimizer that does not derive from "
                "torch.optim.Optimizer cannot be watched"
            )
            yield STEPLESS.finding(
                f"no step of a torch optimizer was seen, so there is nothing to compare: {why}",
                "audit a script that trains; for ranks that the script starts itself use "
                "`--nproc-per-node 1`",
                evidence={"backwards": backwards},
            )
        elif world.size > 1 and not world.started_group:
            yield APART.finding(
                f"{len(trained)} processes trained and none started a process group: each trained "
                "a model of its own, and nothing ties them together",
                "call torch.distributed.init_process_group() and synchronise the gradients, or "
                "start the script with one process",
                rank=sorted(trained),
                where=next(t.where for led in trained.values() for t in led.tracks),
            )


def _blind(world: World, blind: dict[int, str]) -> Finding:
    why = next(iter(blind.values()))
    return BLIND.finding(
        f"{why}: nothing is known of what was trained there, and nothing was compared",
        "import torch in the script itself, by `import torch`; for processes that the script starts"
        " in a way of its own, audit what they run",
        rank=sorted(blind),
    )


def _steps(ledger: Ledger) -> int:
    return sum(track.count for track in ledger.tracks)
