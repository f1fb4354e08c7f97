# SPDX-License-Identifier: Apache-2.0
"""What became of weights between two steps, and of what weights have moved: the same solve.

Replicas that train on their own and meet now and then (local SGD, averaging of models, an outer
optimizer) are mixed by their weights, and not by their gradients.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from lockstep.audit.diagnoses.ranks import ONE_RANK
from lockstep.audit.diagnoses.scale import UNDIVIDED, rate_is_divided
from lockstep.audit.equations import of_gradients, of_moves, of_weights
from lockstep.audit.expectation import is_near
from lockstep.audit.mixing import solve
from lockstep.audit.rules.base import at_step, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.audit.equations import Equations
    from lockstep.audit.facts import Collective
    from lockstep.audit.finding import Finding
    from lockstep.audit.mixing import Mixing
    from lockstep.audit.shared_track import SharedTrack

_LOOKS: Final = 8
_MEETINGS: Final = 3
"""Steps that must begin with one rank's weights before it counts as lost work: a program may choose
the best replica. One is enough after a broadcast of weights, if no collective let the ranks compare
replicas."""
_CHOOSING: Final = {"MIN", "MAX"}


def diagnose_weights(track: SharedTrack) -> Iterator[Finding]:
    """What is wrong with the weights that an optimizer's steps begin with."""
    met: dict[int, int] = {}
    for number in track.numbers:
        has_changed = any(track.changed_before_step(rank, number) for rank in track.ranks)
        equations = of_weights(track, number) if has_changed else None
        if equations is None:
            continue
        mixings = solve(equations)
        for mixing in mixings:
            calls = _sums_of_weights(track, number, mixing)
            if calls and all(is_near(mixing.total(rank), mixing.size) for rank in mixing.ranks):
                yield _added_up(track, number, mixing, calls[0])
                return
        source = _source(mixings)
        if source is not None:
            met[number] = source
    if len(set(met.values())) == 1:
        sent = [call for number in met for call in _weights_sent(track, number)]
        if sent or len(met) >= _MEETINGS:
            yield _of_one_rank(track, met, sent)


def _source(mixings: Sequence[Mixing]) -> int | None:
    """The rank with whose weights, as its step had left them, all ranks have gone on."""
    found: set[int] = set()
    for mixing in mixings:
        uses = [mixing.use_of(place) for place in range(len(mixing.columns))]
        if set(uses) != {"shared", "lost"} or uses.count("shared") > 1:
            return None
        if any(not is_near(mixing.total(rank), 1.0) for rank in mixing.ranks):
            return None
        found.add(mixing.columns[uses.index("shared")].rank)
    return found.pop() if len(found) == 1 else None


def _weights_sent(track: SharedTrack, number: int) -> list[Collective]:
    """Broadcasts of weights before a step, where ranks told one another nothing to choose by."""
    calls = next(iter(track.steps(number).values())).collectives
    if any("gather" in call.op or call.reduction in _CHOOSING for call in calls):
        return []
    return [call for call in calls if call.op == "broadcast" and call.weights]


def _of_one_rank(track: SharedTrack, met: dict[int, int], sent: list[Collective]) -> Finding:
    source = next(iter(met.values()))
    others = [rank for rank in track.ranks if rank != source]
    often = "once" if len(met) == 1 else f"{len(met)} times"
    first = next(iter(track.steps(track.numbers[0]).values()))
    return ONE_RANK.finding(
        f"after each step the ranks' weights differed, and {often}, first before step "
        f"{min(met) + 1}, the next one began with those of rank {source} on all ranks: what ranks "
        f"{others} computed is lost",
        "average the gradients before the step (`lockstep.average_gradients(model)`, a wrapper), "
        "instead of sending weights after it",
        evidence={"used": source},
        **at_step(
            track,
            track.numbers[0],
            rank=others,
            where=[*(sent[0].where if sent else ()), *first.where],
        ),
    )


def _sums_of_weights(track: SharedTrack, number: int, mixing: Mixing) -> list[Collective]:
    names = {track.held[place].name for place in mixing.parameters}
    step = next(iter(track.steps(number).values()))
    return [c for c in step.collectives if c.weights in names and c.reduction == "SUM"]


def _added_up(track: SharedTrack, number: int, mixing: Mixing, call: Collective) -> Finding:
    names = [track.held[place].name for place in mixing.parameters]
    return UNDIVIDED.finding(
        f"between steps {number} and {number + 1} an all_reduce added up {named(names)} over "
        f"{mixing.size} ranks, and nothing divided the sum: the model is about "
        f"{mixing.size} times as large as each rank's",
        "use op=ReduceOp.AVG, or divide by the number of ranks after the all_reduce",
        parameters=names,
        evidence={"ratio": mixing.total(mixing.ranks[0]), "ranks": mixing.size},
        **at_step(track, number, rank=mixing.ranks, where=call.where),
    )


def diagnose_moves(outer: SharedTrack, tracks: Sequence[SharedTrack]) -> Iterator[Finding]:
    """Is what an outer optimizer steps along the sum of what all ranks' models have moved?"""
    inners = [track for track in tracks if track is not outer and _is_like(track, outer)]
    without = [n for n in outer.numbers[:_LOOKS] if of_gradients(outer, n) is None]
    for inner, number in itertools.product(inners, without):
        for end in inner.numbers:
            equations = of_moves(outer, number, inner, end)
            mixings = [] if equations is None or not _may_be_sums(equations) else solve(equations)
            if len(mixings) == 1 and _are_all_one(mixings[0]):
                yield _moves_added_up(outer, inner, number)
                return


def _may_be_sums(equations: Equations) -> bool:
    """Of all ranks' moves: asked before what is solved, for all ends that a round may have."""
    total, used = equations.local.sum(axis=1), equations.used[0]
    apart = np.minimum(np.abs(used - total), np.abs(used + total))
    return bool(total.any() and np.nanmax(apart) <= 1e-2 * np.abs(total).max())


def _are_all_one(mixing: Mixing) -> bool:
    sizes = abs(mixing.coefficients)
    return bool((abs(sizes - 1.0) <= 1e-2).all()) and bool((mixing.errors < 1e-2).all())


def _is_like(inner: SharedTrack, outer: SharedTrack) -> bool:
    shapes = [
        [(rank, p.shape) for rank in track.ranks for p in track.tracks[rank].parameters]
        for track in (inner, outer)
    ]
    return shapes[0] == shapes[1]


def _moves_added_up(outer: SharedTrack, inner: SharedTrack, number: int) -> Finding:
    size = len(outer.ranks)
    step = next(iter(outer.steps(number).values()))
    sums = [c for c in step.collectives if (c.op, c.reduction) == ("all_reduce", "SUM")]
    calls = [c.where for c in sums if c.shape != [1]]
    return UNDIVIDED.finding(
        f"step {number + 1} of {outer.first.optimizer}: its gradients are "
        f"what the models of {size} ranks have moved since the last round, added up and not "
        f"divided: {size} times their mean move",
        "use op=ReduceOp.AVG, or divide by the number of ranks after the all_reduce",
        severity="notice" if rate_is_divided(outer) else None,
        evidence={"ranks": size, "ratio": float(size), "moved_by": inner.key},
        **at_step(outer, number, where=[*(calls[-1] if calls else ()), *step.where]),
    )
