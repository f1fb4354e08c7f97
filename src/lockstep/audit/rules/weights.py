# SPDX-License-Identifier: Apache-2.0
"""Elements that do not count the same: a plain mean over different numbers of them.

The gradient of a mean over all samples gives every sample the same weight. Where a rank, or a
micro-batch, divides by its own count and the counts differ, its samples weigh more than others'.
The weights are read from the loss's graph, so that a loss that corrects for it is seen to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lockstep.audit.ledger import Term
from lockstep.audit.rules.base import Code, Explained
from lockstep.audit.rules.multiples import factors_of, samples_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Backward, Step
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

UNEVEN = Code("LS203", "a plain mean over unequal counts")

_SEVERE = 1.2
_EQUAL = 1.001
_WEIGHED = 0.01

_FIX = (
    "weigh every element the same: divide the sum of the losses by the number of elements on all "
    "ranks (and in all micro-batches of the step) and multiply by the number of ranks, or "
    "`gradients.backward(loss, weight=count)` of lockstep.replicate"
)


class Weights:
    """Compares, per backward, how many elements each rank averaged over."""

    codes = (UNEVEN,)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        if world.sync_of_lockstep():
            return
        for track in world.tracks:
            if track.key in explained.tracks or track.returns_to_agreement:
                continue  # models that are averaged after a round take steps of their own
            found = (
                _between_ranks(track) or _between_micro_batches(track) or _between_windows(track)
            )
            if found is not None:
                yield found
                return


def _between_ranks(track: SharedTrack) -> Finding | None:
    if len(track.ranks) < 2 or _weighs_gradients(track):
        return None
    for number in track.numbers:
        windows = {r: _with_terms(track, r, s) for r, s in track.steps(number).items()}
        # The same backward of the window, on all ranks.
        for at_once in zip(*windows.values(), strict=False):
            if any(b.heads != at_once[0].heads for b in at_once):
                continue  # tasks that the ranks have drawn, with elements of their own kinds
            for terms in zip(*(b.terms for b in at_once), strict=False):
                by_rank = dict(zip(windows, terms, strict=True))
                if _is_uneven(list(terms)):
                    return _finding(
                        track, number, by_rank, at_once[0], "rank", [f"rank {r}" for r in by_rank]
                    )
    return None


def _weighs_gradients(track: SharedTrack) -> bool:
    """Were gradients multiplied by what differs between ranks, by counts, on their way?

    By a communication hook, say; a mean over them is no plain one. Factors far from one in a step
    where counts are apart tell, and of a weighted mean they are one on average.
    """
    for number in track.numbers:
        samples = samples_of(track, track.steps(number))
        factors = None if samples is None else factors_of(samples)
        if factors is None or np.ptp(factors, axis=1).min() < _WEIGHED:
            continue
        if np.abs(factors.mean(axis=1) - 1.0).max() < _WEIGHED / 4:
            return True
    return False


def _between_micro_batches(track: SharedTrack) -> Finding | None:
    for number in track.numbers:
        for rank, step in track.steps(number).items():
            backwards = _with_terms(track, rank, step)
            # Micro-batches are one line that runs again; other losses have lines of their own.
            same = [b for b in backwards if _is_like(b, backwards[0])]
            if len(same) < 2 or any(len(b.terms) != 1 for b in same):
                continue
            terms = [b.terms[0] for b in same]
            if _is_uneven(terms):
                names = [f"micro-batch {place}" for place in range(len(terms))]
                return _finding(
                    track, number, dict(enumerate(terms)), same[0], "micro-batch", names, rank
                )
    return None


def _is_like(one: Backward, other: Backward) -> bool:
    return one.where[:1] == other.where[:1] and one.heads == other.heads


def _between_windows(track: SharedTrack) -> Finding | None:
    """All micro-batches of a step together, where ranks have different numbers of them."""
    for number in track.numbers:
        windows = {r: _with_terms(track, r, s) for r, s in track.steps(number).items()}
        lengths = {len(backwards) for backwards in windows.values()}
        lines = {(p.file, p.line) for w in windows.values() for b in w for p in b.where[:1]}
        every = [b for backwards in windows.values() for b in backwards]
        single = all(len(b.terms) == 1 and b.heads == every[0].heads for b in every)
        if len(windows) < 2 or len(lengths) < 2 or 0 in lengths or len(lines) > 1 or not single:
            continue
        terms = {r: _together([b.terms[0] for b in w]) for r, w in windows.items()}
        if _is_uneven(list(terms.values())):
            first = next(iter(windows.values()))[0]
            return _finding(track, number, terms, first, "rank", [f"rank {r}" for r in terms])
    return None


def _together(terms: Sequence[Term]) -> Term:
    count = sum(t.count for t in terms)
    kinds = {t.kind for t in terms}
    weight = sum(abs(t.weight) * t.count for t in terms) / count if count else 0.0
    return Term(kinds.pop() if len(kinds) == 1 else "mixed", weight, count, terms[0].op)


def _with_terms(track: SharedTrack, rank: int, step: Step) -> list[Backward]:
    """Not those of other optimizers, as in a client's training before the server's step.

    Nor those through models that no optimizer holds. But ``fully_shard`` keeps the gradients of
    micro-batches where no optimizer sees them.
    """
    parameters = track.tracks[rank].parameters
    names, in_pieces = {p.name for p in parameters}, all(p.sharded for p in parameters)

    def concerns(backward: Backward) -> bool:
        if backward.touched:
            return track.key in backward.touched
        return in_pieces or (bool(backward.heads) and names.issuperset(backward.heads))

    return [b for b in step.backwards if b.kind == "backward" and b.terms and concerns(b)]


def _is_uneven(terms: Sequence[Term]) -> bool:
    """The signature of a plain mean: counts differ, and weight times count does not.

    Of one kind of loss: a cross entropy and a squared error are different tasks.
    """
    if len({t.op.split("/")[0] for t in terms}) > 1:
        return False
    if any(t.kind != "mean" or t.count <= 0 or t.weight == 0.0 for t in terms):
        return False
    counts = [t.count for t in terms]
    totals = [abs(t.weight) * t.count for t in terms]
    return max(counts) > _EQUAL * min(counts) and max(totals) <= _EQUAL * min(totals)


def _finding(
    track: SharedTrack,
    number: int,
    terms: dict[int, Term],
    backward: Backward,
    unit: str,
    names: list[str],
    rank: int | None = None,
) -> Finding:
    counts = {place: t.count for place, t in terms.items()}
    ratio = max(counts.values()) / min(counts.values())
    said = ", ".join(
        f"{t.count:.0f} on {name}" for t, name in zip(terms.values(), names, strict=True)
    )
    return UNEVEN.finding(
        f"step {number + 1}: the loss is a mean over {said}, and each {unit} counts the same: one "
        f"element weighs up to {ratio:.3g} times as much as another",
        _FIX,
        severity="error" if ratio >= _SEVERE else "warning",
        rank=sorted(terms) if rank is None else [rank],
        step=number + 1,
        evidence={
            "unit": unit,
            "counts": {str(k): v for k, v in counts.items()},
            "weights": {str(k): t.weight for k, t in terms.items()},
            "op": next(iter(terms.values())).op,
        },
        where=backward.where,
    )
