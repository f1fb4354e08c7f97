# SPDX-License-Identifier: Apache-2.0
"""Replicas that are not the same model: at a step's entry or at its exit, and since when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.audit.diagnoses.ranks import SCALE
from lockstep.audit.finding import with_text
from lockstep.audit.prints import differing
from lockstep.audit.rules.base import Code, Rule, at_step, first_in, first_of_each, named, numbers
from lockstep.audit.rules.gradients import COUNT, reduces_in_its_step
from lockstep.audit.shared_track import names_of
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import Difference, SharedTrack

BEFORE = Code("LS302", "replicas differ before the first step")
BETWEEN = Code("LS303", "replicas changed between two steps")
AFTER = Code("LS304", "replicas differ after a step from equal gradients")
HYPER = Code("LS305", "optimizers have different settings")
STATE = Code("LS306", "optimizers have different states")


def _look(world: World) -> Iterable[Finding]:
    """Parameters, settings and states, for optimizers whose gradients agree."""
    for track in world.in_step:
        # A rank with fewer batches may be in its next epoch in a step of that number.
        is_apart = any(f.joins for f in world.facts) and track.counts_differ
        settings = None if is_apart else first_in(track, _settings)
        hyper = settings or _holdings(world, track)
        if hyper is not None:
            yield hyper
        drift = _drift(track)
        if drift is not None and not (hyper is not None and drift.code == AFTER.code):
            yield drift


REPLICAS = Rule((BEFORE, BETWEEN, AFTER, HYPER, STATE), _look)


def _drift(track: SharedTrack) -> Finding | None:
    previous: int | None = None
    for number in track.numbers[: 1 if track.counts_differ else None]:
        at_entry = track.differences("entry", number)
        if at_entry:
            return _at_entry(track, number, previous, at_entry)
        at_exit = track.differences("exit", number)
        if at_exit and not track.counts_differ:
            return _at_exit(track, number, at_exit)
        previous = number
    return None


def _details(track: SharedTrack, number: int, differences: list[Difference]) -> dict[str, Any]:
    return at_step(
        track,
        number,
        rank=sorted({r for d in differences for r in d.ranks}),
        parameters=names_of(differences),
        evidence={"norms": differences[0].norms, "drift": track.drift_table()},
    )


def _at_entry(
    track: SharedTrack, number: int, previous: int | None, differences: list[Difference]
) -> Finding:
    worst = max(differences, key=lambda d: d.largest)
    seen = (
        f"{named(names_of(differences))} ({len(differences)} of {len(track.parameters)} "
        f"parameters) differ by up to {worst.largest:.3g}; first element of `{worst.name}`: "
        f"{numbers({r: s[0] for r, s in worst.samples.items() if s})}"
    )
    if previous is None:
        return BEFORE.finding(
            f"when the first step began, {seen}",
            "build, initialise and load the model on every rank before it is wrapped, or "
            "broadcast it from rank 0 afterwards",
            **_details(track, number, differences),
        )
    since = (
        f"between steps {previous + 1} and {number + 1}"
        if number == previous + 1
        else f"since some step after {previous + 1}; seen at the beginning of step {number + 1}"
    )
    return BETWEEN.finding(
        f"the gradients agreed and the replicas changed {since}, outside an optimizer step: {seen}",
        "what writes to parameters (loading, a callback, averaging, clamping) has to run on every "
        "rank, or be followed by a broadcast from rank 0",
        **_details(track, number, differences),
    )


def _at_exit(track: SharedTrack, number: int, differences: list[Difference]) -> Finding:
    worst = max(differences, key=lambda d: d.largest)
    return AFTER.finding(
        f"step {number + 1} began with equal replicas and equal gradients and left "
        f"{named(names_of(differences))} up to {worst.largest:.3g} apart",
        "the optimizer's state has to be the same on every rank: load it everywhere, and step on "
        "every rank",
        **_details(track, number, differences),
    )


def _settings(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    for place in range(min((len(s.hyper) for s in steps.values()), default=0)):
        groups = {rank: step.hyper[place] for rank, step in steps.items()}
        shared = set.intersection(*(set(g) for g in groups.values()))
        for name in sorted(shared):
            values = {rank: group[name] for rank, group in groups.items()}
            if max(values.values()) - min(values.values()) > 1e-9 * abs(max(values.values())):
                return HYPER.finding(
                    f"step {number + 1} of {track.key.split('#')[0]} used `{name}` "
                    f"{numbers(values)}",
                    f"compute `{name}` from what all ranks share (the global step, a metric "
                    "averaged over ranks), not from this rank's own loss or progress",
                    evidence={name: values},
                    **at_step(track, number, rank=sorted(values), optimizer=""),
                )
    return None


def _holdings(world: World, track: SharedTrack) -> Finding | None:
    """What one wrapper reduces on all ranks, optimizers of all ranks should hold."""
    held = {
        rank: {
            p.name
            for p in of_rank.parameters
            if p.wrapper and not p.local and set(track.ranks) <= set(p.group or track.ranks)
        }
        for rank, of_rank in track.tracks.items()
    }
    elsewhere = {
        rank: {p.name for t in world.ledgers[rank].tracks if t.count for p in t.parameters}
        for rank in held
    }
    if len(set().union(*held.values())) == sum(map(len, held.values())):
        return None  # each has a part of its own: the optimizer's state is shared out
    everything = set().union(*held.values())
    missing = {rank: sorted(everything - elsewhere[rank]) for rank in held}
    without = [rank for rank, names in missing.items() if names]
    if not without or not all(held.values()):
        return None
    names = missing[without[0]]
    having = sorted(rank for rank in held if names[0] in elsewhere[rank])
    last = [of_rank.steps[-1] for of_rank in track.tracks.values() if of_rank.steps]
    return HYPER.finding(
        f"{track.key.split('#')[0]} holds {named(names)} on ranks {having} and not on ranks "
        f"{without}: only some replicas are updated",
        "add parameters to the optimizer on every rank at the same step, by what all ranks share",
        rank=without,
        parameters=names,
        evidence={"having": having, "without": without},
        where=[*(last[0].where if last else ()), *track.first.where],
    )


def _look_at_states(world: World) -> Iterable[Finding]:
    """The optimizer's own tensors: momentum, second moments, step counts."""
    loaded = [place for facts in world.facts for place in facts.states_loaded]
    for found in first_of_each(filter(_have_one_state, world.in_step), _state_at):
        measured, *others = found.where
        where = [measured, *dict.fromkeys(with_text(loaded)), *others]
        yield replace(found, where=where)


STATES = Rule((STATE,), _look_at_states)


def _have_one_state(track: SharedTrack) -> bool:
    """Not where the k-th steps of the ranks are not the same step.

    Nor where momentum of own gradients, or what was not sent, is a rank's own.
    """
    named_alike = all(t.state_names == track.first.state_names for t in track.tracks.values())
    return named_alike and not track.counts_differ and not reduces_in_its_step(track)


def _state_at(track: SharedTrack, number: int) -> Finding | None:
    states = {r: s.state for r, s in track.steps(number).items() if s.state is not None}
    if len(states) < 2 or len({len(s.hashes) for s in states.values()}) > 1:
        return None
    names = dict(enumerate(track.first.state_names))
    replicas = {shared.name for shared in track.parameters if shared.groups == [track.ranks]}
    different = [
        place
        for place in differing(list(states.values()), norms=1e-5)
        if place not in names or names[place].rsplit(".", 1)[0] in replicas
    ]
    if not different:
        return None
    told = [names.get(place, str(place)) for place in different]
    norms = {rank: float(state.norms[different[0]]) for rank, state in states.items()}
    return STATE.finding(
        f"after step {number + 1} the states of {len(different)} tensors differ between ranks "
        f"(norm of `{told[0]}`: {numbers(norms)})",
        "load the optimizer's state on every rank, and skip a step on every rank or on none",
        parameters=told,
        evidence={"norms": norms},
        **at_step(track, number, rank=sorted(norms)),
    )


def _look_at_scales(world: World) -> Iterable[Finding]:
    """GradScaler's factor."""
    seen = {r: led.facts for r, led in world.ledgers.items() if led.facts.scales}
    # Models that need not agree after each step may overflow at different steps.
    is_apart = any(len(track.ranks) > 1 for track in world.tracks) and not world.in_step
    if len(seen) < 2 or is_apart:
        return
    of_all = set.intersection(*(set(facts.scales) for facts in seen.values()))
    for number in sorted(map(int, of_all)):
        values = {rank: facts.scales[str(number)] for rank, facts in seen.items()}
        if len(set(values.values())) > 1:
            yield SCALE.finding(
                f"call {number} of GradScaler.step used a scale of {numbers(values)}",
                "all ranks have to see the same found_inf: unscale gradients that are already "
                "reduced, and make the scaler with the same arguments on every rank",
                rank=sorted(values),
                step=number,
                where=next(iter(seen.values())).scaled_at,
                evidence={"scale": values},
                optimizer="*",
            )
            return


SCALES = Rule((SCALE,), _look_at_scales)


def _look_at_counts(world: World) -> Iterable[Finding]:
    """How often each rank stepped."""
    if any(f.joins for f in world.facts):
        return
    for track in world.in_step:
        if track.counts_differ:
            counts: dict[int, float] = {rank: t.count for rank, t in track.tracks.items()}
            yield COUNT.finding(
                f"{track.key.split('#')[0]} stepped a different number of times: {numbers(counts)}",
                "give every rank the same number of batches (a DistributedSampler pads), and "
                "skip a step on every rank or on none",
                rank=sorted(counts),
                evidence={"steps": counts},
                where=[
                    place
                    for each in track.tracks.values()
                    for places in (*(step.where for step in each.steps[-1:]), each.where)
                    for place in places
                ],
            )


STEP_COUNTS = Rule((COUNT,), _look_at_counts, (World.has_failed,))
