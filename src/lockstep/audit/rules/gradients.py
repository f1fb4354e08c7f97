# SPDX-License-Identifier: Apache-2.0
"""Gradients that an optimizer used and that were not the same on all ranks, and why."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.diagnoses.ranks import DIFFER, SCALE
from lockstep.audit.diagnoses.seen import seen_in
from lockstep.audit.rules.base import Code, Rule, at_step, first_in, named, numbers
from lockstep.audit.rules.left_by_backward import adding_backwards
from lockstep.audit.rules.reasons import reason_of
from lockstep.audit.shared_track import names_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.audit.facts import Collective, Step
    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.shared_track import Difference, SharedTrack
    from lockstep.audit.world import World

BYPASSED = Code("LS101", "gradients passed no reduction")
UNKNOWN = Code("LS102", "parameters that nobody synchronises")
MIXED = Code("LS105", "different parameters were reduced together")
MISSING = Code("LS106", "gradients exist on some ranks only")
COUNT = Code("LS308", "ranks took different numbers of steps")

_CODES: Final = {"unknown": UNKNOWN, "after": DIFFER, "mixed": MIXED, "scales": SCALE}


def _look(world: World) -> Iterable[Finding]:
    """Compares, at each step, what the optimizers of all ranks consumed."""
    yield from map(_as_own_models, world.alone[:1])
    yield from itertools.starmap(_as_own_layers, world.maybe_forgotten)
    for track in world.in_step:
        found = (
            first_in(track, _mixed)
            or _first_different(world, track)
            or first_in(track, _missing)
            or _first_left_over(track)
        )
        if found is not None and found.code in (DIFFER.code, SCALE.code):
            if track.counts_differ:
                continue  # the k-th steps of these ranks are not the same step
            found = _out_of_step(track) or found
        if found is not None:
            yield found


GRADIENTS = Rule((BYPASSED, UNKNOWN, DIFFER, MIXED, MISSING, COUNT), _look)


def _as_own_models(track: SharedTrack) -> Finding:
    """What ranks train apart from the start: meant, or never tied together."""
    number = track.numbers[0]
    differences = track.differences("entry", number)
    names = names_of(differences)
    return BYPASSED.finding(
        f"each rank seems to train a model of its own: {_how_many(names, track)} differ when the "
        f"first step begins (norm of `{names[0]}`: {numbers(differences[0].norms)}), no wrapper "
        "holds them, and the ranks added up nothing as large as the model",
        "nothing, if it is meant, as for folds or trials. Otherwise build the model alike on every "
        "rank and wrap it in DistributedDataParallel, or call `lockstep.replicate(model)`",
        severity="notice",
        parameters=names,
        evidence={"norms": differences[0].norms},
        **at_step(track, number, where=_places(track, number), optimizer=""),
    )


def _as_own_layers(track: SharedTrack, differences: list[Difference]) -> Finding:
    """Beside what is synchronised: layers of each rank's own, or forgotten ones."""
    number = track.numbers[0]
    names = names_of(differences)
    return UNKNOWN.finding(
        f"each rank seems to train {named(names)} for itself: the first step begins with other "
        f"values on each (norm of `{differences[0].name}`: {numbers(differences[0].norms)}), and "
        "nothing reduces their gradients",
        "nothing, if it is meant, as for a task of each rank's own. Otherwise build them alike on "
        "every rank, and put them into the module that is wrapped or handed to `replicate`",
        severity="notice",
        parameters=names,
        evidence={"norms": differences[0].norms},
        **at_step(track, number, where=_places(track, number), optimizer=""),
    )


def _out_of_step(track: SharedTrack) -> Finding | None:
    """Ranks took as many steps and ran other backwards for them."""
    for number in track.numbers:
        steps = track.steps(number)
        counts: dict[int, float] = {rank: len(step.backwards) for rank, step in steps.items()}
        if len(set(counts.values())) > 1:
            return COUNT.finding(
                f"step {number + 1} of {track.key.split('#')[0]} ended other numbers of backwards "
                f"({numbers(counts)}), and its gradients differ: some ranks ran a backward that "
                "others did not run, or skipped a step that others took",
                "run the same backwards on every rank, also for a log or an evaluation; decide by "
                "what all ranks share whether to step, e.g. by a loss that is averaged over them",
                evidence={"backwards": counts},
                **at_step(track, number),
            )
        if track.differences("gradients", number):
            return None
    return None


def _mixed(track: SharedTrack, number: int) -> Finding | None:
    """The k-th reduction of a step must concern one parameter on all ranks."""
    for at_once in _reduced_together(track.steps(number)):
        names = {rank: call.parameter for rank, call in at_once.items()}
        if all(names.values()) and len(set(names.values())) > 1:
            listed = ", ".join(f"`{name}` on rank {rank}" for rank, name in names.items())
            where = [place for call in at_once.values() for place in call.where]
            return MIXED.finding(
                f"one all_reduce added up the gradients of different parameters: {listed}",
                "reduce the same parameters in the same order on every rank: a gradient that "
                "is None on this rank takes part as zeros "
                "(`lockstep.average_gradients(model)` does that)",
                parameters=sorted({str(name) for name in names.values()}),
                evidence={"reduced": names},
                **at_step(track, number, rank=sorted(names), where=where),
            )
    return None


def _reduced_together(steps: dict[int, Step]) -> Iterator[dict[int, Collective]]:
    """By rank: the calls that met, group by group.

    Those without a name count as well: zeros, say, that stand for a gradient.
    """
    groups: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    for rank, step in steps.items():
        for call in step.collectives:
            if call.op == "all_reduce" and rank in call.group:
                groups.setdefault(tuple(call.group), {}).setdefault(rank, []).append(call)
    for calls in groups.values():
        for at_once in zip(*calls.values(), strict=False):
            yield dict(zip(calls, at_once, strict=True))


def _missing(track: SharedTrack, number: int) -> Finding | None:
    missing = track.missing("gradients", number)
    if not missing:
        return None
    _, present, absent = missing[0]
    ranks = sorted({rank for _, _, without in missing for rank in without})
    return MISSING.finding(
        f"the gradient of {named([m[0] for m in missing])} is None on ranks {absent} and "
        f"is not on ranks {present}: only some replicas were updated",
        "let every rank reduce every parameter, zeros where it has no gradient: "
        "DistributedDataParallel(find_unused_parameters=True), or "
        "`lockstep.replicate(model)`",
        parameters=[m[0] for m in missing],
        evidence={"present": present, "absent": absent},
        **at_step(track, number, rank=ranks, where=_places(track, number)),
    )


def _first_left_over(track: SharedTrack) -> Finding | None:
    """What a step has used is still there when the next backward begins: on some ranks only."""
    for previous, number in itertools.pairwise(track.numbers):
        stale, clear = [], []
        for rank, step in track.steps(number).items():
            adding = adding_backwards(step, track.key)
            before = adding[0].before.get(track.key) if adding else None
            last = track.step(rank, previous)
            if before is None or last is None or last.gradients is None or number != previous + 1:
                return None
            if not np.nan_to_num(before.norms).any():
                clear.append(rank)
            elif (before.hashes == last.gradients.hashes).all():
                stale.append(rank)
        if stale and clear:
            return MISSING.finding(
                f"step {number + 1}: when backward began, the gradients that step {previous + 1} "
                f"had used were still there on ranks {stale} and not on ranks {clear}: the next "
                "ones are added to them",
                "call `optimizer.zero_grad()` on every rank, once a step",
                evidence={"left": stale, "cleared": clear},
                **at_step(track, number, rank=stale, where=_places(track, number)),
            )
    return None


def _first_different(world: World, track: SharedTrack) -> Finding | None:
    for number in track.numbers:
        differences = track.differences("gradients", number)
        if differences:
            if reduces_in_its_step(track):
                return None
            return _as_finding(world, track, number, differences)
    return None


def reduces_in_its_step(track: SharedTrack) -> bool:
    """An optimizer of the program's own: other gradients go in, and the same weights come out."""
    changed = any(
        step.entry is not None
        and step.exit is not None
        and bool((step.entry.hashes != step.exit.hashes).any())
        for number in track.numbers
        for step in track.steps(number).values()
        if track.differences("gradients", number)
    )
    return changed and not any(map(track.come_out_apart, track.numbers))


def _as_finding(
    world: World, track: SharedTrack, number: int, differences: list[Difference]
) -> Finding:
    names = names_of(differences)
    reason = reason_of(world, track, number, set(names))
    code = _CODES.get(reason.kind, BYPASSED)
    worst = max(differences, key=_apart)
    missing = track.missing("gradients", number)
    message = (
        f"step {number + 1}: the gradients of {_how_many(names, track)} differ between ranks "
        f"(norm of `{worst.name}`: {numbers(worst.norms)}): {reason.text}"
    )
    return code.finding(
        message,
        reason.fix,
        parameters=names,
        evidence={
            "reason": reason.name,
            **_coefficients(track, number, set(names)),
            **reason.evidence,
            "gradients": track.gradient_table(worst.name),
            "drift": track.drift_table(),
            "missing": [m[0] for m in missing],
        },
        **at_step(
            track,
            number,
            rank=sorted({r for d in differences for r in d.ranks}),
            where=[*reason.where, *_places(track, number)],
        ),
    )


def _coefficients(track: SharedTrack, number: int, names: set[str]) -> dict[str, Any]:
    """By what each rank's gradients were multiplied in what every rank used, if that is known."""
    seen = next((s for s in seen_in(track, number, None) if names & set(s.names)), None)
    return {} if seen is None else seen.as_evidence()


def _apart(difference: Difference) -> float:
    values = list(difference.norms.values())
    spread = max(values) - min(values)
    return spread if spread == spread else float("inf")


def _how_many(names: list[str], track: SharedTrack) -> str:
    if len(names) == len(track.parameters) and len(names) > 3:
        return f"all {len(names)} parameters"
    return f"{named(names)} ({len(names)} of {len(track.parameters)} parameters)"


def _places(track: SharedTrack, number: int) -> list[Place]:
    """backward's lines, those of a reduction by hand, then the optimizer step's."""
    for step in track.steps(number).values():
        backwards = [b.where for b in step.backwards[-2:]]
        by_hand = [
            call.where[:2]
            for call in step.collectives
            if call.op == "all_reduce" and math.prod(call.shape) > 1 and not call.in_backward
        ]
        return [p for places in (*backwards, *by_hand[-1:], step.where) for p in places]
    return []


def _look_for_left_out(world: World) -> Iterable[Finding]:
    """A notice: a client's norms, or its head, may stay at home on purpose."""
    for track in world.compared:
        if track.at_home:
            names = sorted(track.at_home)
            yield UNKNOWN.finding(
                f"the ranks average the weights of other layers, and never {named(names)}: "
                "each rank has its own",
                "average them as well, if all ranks are to have one model",
                severity="notice",
                rank=track.ranks,
                parameters=names,
                where=track.first.where,
                optimizer=track.first.key_of_all,
            )
            return


LEFT_OUT = Rule((UNKNOWN,), _look_for_left_out)
