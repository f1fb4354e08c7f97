# SPDX-License-Identifier: Apache-2.0
"""Parameters that ranks hold under one name and that are not to be the same after each step.

Torch's own types say so themselves (`lockstep.audit.probe.shards`). Where a program cuts its model
up by hand, the work shows it: in a pipeline only some ranks have a loss, and ranks that share the
work on one batch are given the same inputs, and communicate inside backward. Beside parameters that
are synchronised a rank may have some of its own, which never were the same: tables, experts, heads
of its own task. Only a parameter that once was the same on all ranks is known to be a replica.

Replicas may drift apart and meet again, too, at whatever steps: local SGD, federated averaging.
Ranks may take different numbers of steps between two meetings, and make an optimizer for each.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

from lockstep.audit.dealt import is_dealt_out
from lockstep.audit.ledger import ADDING_UP, MODELS_SENT, REDUCING, SCATTERING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from lockstep.audit.facts import Collective, ModelSent, Step
    from lockstep.audit.ledger import Ledger
    from lockstep.audit.shared_track import SharedTrack

_STEPS: Final = 3


def apart_by_design(
    together: Sequence[SharedTrack], tracks: Iterable[SharedTrack]
) -> tuple[set[str], bool]:
    """Names of parameters that nobody reduces, of ranks that do different work; is it a guess?

    Only where what they do shows it: replicas that nobody synchronises are an error. Where others
    are synchronised, those that never were the same may be each rank's own, and only rows that are
    sent in backward, as to experts, tell them from forgotten ones.

    Args:
        together: the optimizers of one set of parameters, the first one first.
        tracks: all of them.
    """
    track = together[0]
    if len(track.ranks) < 2 or not track.numbers:
        return set(), False
    unreduced = {p.name for p in track.parameters if p.wrapper is None}
    unreduced -= {c.parameter for each in together for c in _reductions(each) if c.parameter}
    if not unreduced or _only_some_have_a_loss(track.steps(track.numbers[0])):
        return unreduced, False
    own = set.intersection(*map(_own_from_the_start, together))
    names, early = _with_their_layers(unreduced & own, unreduced), track.numbers[:_STEPS]
    if all(_share_the_work(track, number) for number in early):
        return names, False
    if any(_is_synchronised(each, own) for each in tracks):
        return names, not all(_send_in_backward(track.steps(number)) for number in early)
    return set(), False


def _own_from_the_start(track: SharedTrack) -> set[str]:
    """Names of parameters that differed when the first step began, and whose gradients differ."""
    early = track.numbers[:_STEPS]
    used = {d.name for number in early for d in track.differences("gradients", number)}
    return used & {d.name for d in track.differences("entry", 0)}


def _with_their_layers(names: set[str], unreduced: set[str]) -> set[str]:
    """With those of the same layers that nobody reduces either: biases may all begin as zeros."""
    layers = {name.rpartition(".")[0] for name in names}
    return names | {name for name in unreduced if name.rpartition(".")[0] in layers - {""}}


def are_own_models(track: SharedTrack) -> bool:
    """Does each rank train a model of its own, as one trial of a search?

    Their names or shapes say so, or their settings where they never were the same: a replica that
    nobody synchronises is built and trained as the others are.
    """
    if len(track.ranks) < 2 or not track.numbers or _is_synchronised(track):
        return False
    held = [{p.name for p in t.parameters if p.in_module} for t in track.tracks.values()]
    if all(held) and len(set().union(*held)) == sum(map(len, held)):
        return True
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for of_rank in track.tracks.values():
        for param in of_rank.parameters:
            if param.in_module and not param.sharded:
                shapes.setdefault(param.name, set()).add(tuple(param.shape))
    if any(len(of_name) > 1 for of_name in shapes.values()):
        return True
    steps = track.steps(track.numbers[0])
    settings = {str(step.hyper) for step in steps.values()}
    return len(settings) == len(track.ranks) and bool(track.differences("entry", track.numbers[0]))


def tell_of_own_models(
    ledgers: Mapping[int, Ledger], tracks: Iterable[SharedTrack], track: SharedTrack
) -> bool:
    """Do ranks that nothing synchronises send one another what they have?

    As in elastic averaging, codistillation, or models that are swapped every few steps, or gossip
    after each. Other than weights, what is sent in most steps are gradients; plain weights that are
    added up are to become those of all ranks.
    """
    if _reduces_gradients(track):
        return False
    sizes = {sum(math.prod(p.shape) for p in t.parameters) for t in track.tracks.values()}
    for rank, ledger in ledgers.items():
        sent = [s for s in ledger.facts.models_sent if s.size in sizes]
        if not sent or all(s.weights and s.op in REDUCING for s in sent):
            return False
        alike = [t.tracks.get(rank) for t in tracks if t.made_as == track.made_as]
        steps = sum(len(t.steps) for t in alike if t is not None)
        if _is_in_every_step(ledger, sent, steps) and not _mixes_in_weights(track, rank, sent):
            return False
    return True


def _is_in_every_step(ledger: Ledger, sent: list[ModelSent], steps: int) -> bool:
    """Of the `steps` that are written down, or of those before there were too many to note."""
    at = {s.steps for s in sent if s.detailed}
    full = len(ledger.facts.models_sent) >= MODELS_SENT
    return 2 * len(at) > (max(at, default=0) + 1 if full else steps)


def may_be_own_models(ledgers: Mapping[int, Ledger], track: SharedTrack) -> bool:
    """Do ranks train models that never were the same, and nothing says that they should be?

    As the members of an ensemble, folds or agents: no wrapper, no sum as large as the model, no
    samples that were dealt out by rank. Ranks that never tell one another a number have been
    forgotten.
    """
    if len(track.ranks) < 2 or not track.differences("entry", 0):
        return False
    size = min(sum(math.prod(p.shape) for p in t.parameters) for t in track.tracks.values())
    for ledger in ledgers.values():
        steps = [step for t in ledger.tracks for step in t.steps]
        if any(p.wrapper or p.sharded for t in ledger.tracks for p in t.parameters):
            return False
        if any(b.wrappers for step in steps for b in step.backwards):
            return False
        if any(_may_synchronise(step, size) for step in steps):
            return False
        if all(call.op in ("barrier", "monitored_barrier") for call in ledger.calls):
            return False
    loadings = {rank: ledger.loadings for rank, ledger in ledgers.items()}
    is_dealt = is_dealt_out(loadings) or (_read_apart(track) and not _train_several(ledgers, track))
    return bool(track.differences("gradients", 0)) and not is_dealt


def _train_several(ledgers: Mapping[int, Ledger], track: SharedTrack) -> bool:
    """Does each rank train several such models? Then the ranks have shared the models out, as folds
    of a cross-validation, and not the samples of one."""
    shapes = [p.shape for p in track.first.parameters]
    tracks = [[[p.shape for p in t.parameters] for t in led.tracks] for led in ledgers.values()]
    return all(of_rank.count(shapes) > 1 for of_rank in tracks)


def _read_apart(track: SharedTrack) -> bool:
    """Of samples that no loader gave: does no rank read what another one does?"""
    read = [{row for s in t.steps for row in s.fed_rows} for t in track.tracks.values()]
    return all(read) and len(set().union(*read)) == sum(map(len, read))


def _may_synchronise(step: Step, size: int) -> bool:
    """Are gradients or weights added up, or as many numbers as a model has?"""
    sums = [c for c in step.collectives if c.op in ADDING_UP]
    return any(c.parameter or c.weights for c in sums) or size <= sum(
        math.prod(c.shape) for c in sums if c.shape
    )


def _mixes_in_weights(track: SharedTrack, rank: int, sent: list[ModelSent]) -> bool:
    """Are they weights, to a peer or to all, and do a rank's change between its steps?

    Weights that are gathered and change nothing may be looked at only.
    """
    told = {s.op for s in sent if s.weights} - set(REDUCING)
    if not told or rank not in track.tracks:
        return False
    return any(track.changed_before_step(rank, number) for number in track.numbers_of(rank))


def kept_at_home(tracks: Sequence[SharedTrack]) -> frozenset[str]:
    """Names of parameters that stay each rank's own, where the others' weights are averaged.

    Whole layers, as a client's norms or its head; a layer of which a part is averaged has been
    forgotten in part.

    Args:
        tracks: the optimizers of one set of parameters.
    """
    if any(map(_reduces_gradients, tracks)):
        return frozenset()
    names = {p.name for track in tracks for p in track.parameters}
    averaged = {
        call.weights
        for track in tracks
        for number in track.numbers
        for step in track.steps(number).values()
        for call in step.collectives
        if call.weights and call.op in REDUCING
    }
    layers = {name.rpartition(".")[0] for name in averaged}
    left_out = names - averaged
    if not averaged or any(name.rpartition(".")[0] in layers for name in left_out):
        return frozenset()
    return frozenset(left_out)


def _is_synchronised(track: SharedTrack, own: Collection[str] = ()) -> bool:
    """By a wrapper, or by sums of gradients, of weights, or of what may be either, flat.

    Args:
        own: names of parameters that are not asked about.
    """
    sizes = [math.prod(p.shape) for p in track.first.parameters if p.name not in own]
    largest = max(sizes, default=math.inf)
    return _is_wrapped(track) or any(
        c.parameter or c.weights or c.op in SCATTERING or 1 < math.prod(c.shape) >= largest
        for c in _reductions(track)
    )


def _reduces_gradients(track: SharedTrack) -> bool:
    return _is_wrapped(track) or any(c.parameter for c in _reductions(track))


def _is_wrapped(track: SharedTrack) -> bool:
    return any(p.wrapper for of_rank in track.tracks.values() for p in of_rank.parameters)


def _reductions(track: SharedTrack) -> list[Collective]:
    """Sums that all ranks get, or that the program itself scatters."""
    steps = [s for number in track.numbers[:_STEPS] for s in track.steps(number).values()]
    return [
        c
        for step in steps
        for c in step.collectives
        if c.op in REDUCING or (c.op in SCATTERING and not c.in_backward)
    ]


def names_in_modules(track: SharedTrack) -> set[str]:
    held = [p for of_rank in track.tracks.values() for p in of_rank.parameters]
    return {p.name for p in held if p.in_module}


def _send_in_backward(steps: dict[int, Step]) -> bool:
    """Rows or their gradients, and not the sums of what parameters are owed."""
    return all(
        any(c.in_backward and c.op not in REDUCING for c in step.collectives)
        for step in steps.values()
    )


def _only_some_have_a_loss(steps: dict[int, Step]) -> bool:
    """The stages of a pipeline but the last begin backward with what they are sent."""
    losses = [[b.loss for b in s.backwards if b.kind == "backward"] for s in steps.values()]
    without = [all(loss is None for loss in of_rank) for of_rank in losses]
    return all(losses) and any(without) and not all(without)


def _share_the_work(track: SharedTrack, number: int) -> bool:
    steps = track.steps(number).values()
    talk = all(any(c.in_backward for c in step.collectives) for step in steps)
    return talk and track.fed(number) == "same"


def meet_again(tracks: Sequence[SharedTrack]) -> bool:
    """Are all ranks at the same weights once more, after each had been where no other was?

    At all weights at once, or at each parameter by itself, as where pieces are averaged in turn.

    Args:
        tracks: the optimizers of one set of parameters, the first one first.
    """
    if len(tracks[0].ranks) < 2:
        return False
    visited = [_states(tracks, rank) for rank in tracks[0].ranks]
    # Not strict: a rank may have left no step.
    by_parameter = list(zip(*(zip(*states, strict=True) for states in visited), strict=False))
    moved = [of_ranks for of_ranks in by_parameter if len(set().union(*of_ranks)) > 1]
    return _meet_after_all_were_apart(visited) or (
        bool(moved) and all(map(_meet_after_all_were_apart, moved))
    )


def _meet_after_all_were_apart(visited: Sequence[Sequence[object]]) -> bool:
    """Do all ranks reach one state again, after each was in a state that no other rank was in?

    A rank that is some steps behind is at weights that another one had before: this is no meeting.

    Args:
        visited: what stands for each rank's states, in their order.
    """
    for place, at_once in enumerate(zip(*visited, strict=False)):
        if len(set(at_once)) == 1:
            continue
        others = [
            set(itertools.chain.from_iterable(states for states in visited if states is not own))
            for own in visited
        ]
        if any(state in seen for state, seen in zip(at_once, others, strict=True)):
            return False
        return bool(set.intersection(*(set(states[place + 1 :]) for states in visited)))
    return False


def _states(tracks: Sequence[SharedTrack], rank: int) -> list[tuple[int, ...]]:
    """What stands for each weight that all ranks hold, as each step of `rank` began with it."""
    found = []
    for track in tracks:
        shared = (p for p in track.parameters if len(p.index) == len(track.ranks))
        places = [parameter.index[rank] for parameter in shared]
        for number in track.numbers_of(rank):
            step = track.step(rank, number)
            if step is not None and step.entry is not None and len(step.entry.hashes):
                found.append(tuple(int(step.entry.hashes[place]) for place in places))
    return found
