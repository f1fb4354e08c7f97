# SPDX-License-Identifier: Apache-2.0
"""What a program did on N ranks, beside what it did in one process."""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import FLOOR, TOLERANCE
from lockstep.errors import LockstepError, PeerLostError

OUTCOMES = ("exact", "refused", "unexplained", "wrong", "hang", "crash")
"""All but the first two are failures."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        kind: one of `OUTCOMES`, or "discarded".
        what: which failure of its kind: what a smaller program has to show as well.
        text: for people.
    """

    kind: str
    what: str = ""
    text: str = ""

    @property
    def fails(self) -> bool:
        return self.kind not in ("exact", "refused", "discarded")


@dataclass
class Trace:
    """What one run left: see `World`; tensors by position."""

    seen: list[list[Any]]
    also: list[torch.Tensor]
    final: list[torch.Tensor]
    error: BaseException | None = None
    is_stuck: bool = False


NUDGE = 2.0**-50
"""What is changed of weights to see what comes of it: four units in the last place."""

Spread = dict[int, float]
"""Distances by the identity of a tensor of the truth."""


class Differs(Exception):
    """Not what one process had. The arguments: what, and the details."""


def judged(
    true: Trace,
    ranks: list[Trace],
    *,
    is_late: bool,
    by_hand: bool,
    steps_ahead: int = 0,
    spread: Spread | None = None,
) -> Outcome:
    """Compare.

    Args:
        true: of one process.
        ranks: of the ranks.
        is_late: a rank waited until its patience ended.
        by_hand: weights change outside optimizers, where nothing can refuse beforehand.
        steps_ahead: so many steps of an optimizer a rank that has nothing to be refused takes
            before its next round, in which it hears of a peer's refusal; see `docs/adr/0022`.
        spread: what the program makes of a rounding error, where that is more than usual.
    """
    errors = [trace.error for trace in ranks]
    if any(trace.is_stuck for trace in ranks):
        return Outcome("hang", "stuck", "a rank did not end")
    hears_later = steps_ahead > 0 and any(isinstance(e, LockstepError) for e in errors)
    if hears_later:
        ranks, by_hand = _until_refused(ranks, steps_ahead), True
    try:
        _compare(true, ranks, whole=not any(errors), by_hand=by_hand, spread=spread or {})
    except Differs as difference:
        what, text = difference.args
        return Outcome("wrong", what, f"{text}{_shown(errors)}")
    if not any(errors):
        return Outcome("exact")
    foreign = [e for e in errors if e is not None and not isinstance(e, LockstepError)]
    if foreign:
        frames = traceback.format_exception(foreign[0])[-3:]
        text = "".join("\n".join(frame.splitlines()[:4]) + "\n" for frame in frames)
        return Outcome("crash", f"{type(foreign[0]).__name__}: {str(foreign[0])[:50]}", text)
    if is_late and not hears_later:
        return Outcome("hang", "timeout", _shown(errors))
    coded = [e.code for e in errors if e is not None and not isinstance(e, PeerLostError)]
    if hears_later:
        return Outcome("refused", f"{(coded or ['LS601'])[0]}", _shown(errors))
    if not coded:
        return Outcome("crash", "peers lost, and no rank says why", _shown(errors))
    if None in errors:
        return Outcome("wrong", "refused on some ranks only", _shown(errors))
    return Outcome("refused", coded[0], _shown(errors))


def spread_of(true: Trace, nearby: Trace) -> Spread:
    """How far apart one process ends up when it begins from nearly the same weights.

    Where weights blow up, where matrices are inverted, or where a gradient is zero but for
    rounding errors, sums over the rows in another order show as well: the tolerance is of a
    program that hands on a relative change of `NUDGE` as it is, and grows with what this one
    makes of it.
    """
    pairs = list(itertools.zip_longest(_tensors(true), _tensors(nearby)))
    if not all(getattr(a, "shape", None) == getattr(b, "shape", None) for a, b in pairs):
        return {}  # it takes another way: nothing is known
    return {id(a): float((a - b).abs().norm()) for a, b in pairs if a is not None}


def _until_refused(ranks: list[Trace], steps_ahead: int) -> list[Trace]:
    """Without the steps that a rank may be ahead of the one that was refused."""
    ends = [min(map(len, column)) for column in zip(*(t.seen for t in ranks), strict=True)]

    def until(trace: Trace) -> Trace:
        pairs = zip(trace.seen, ends, strict=True)
        seen = [steps[:end] if len(steps) <= end + steps_ahead else steps for steps, end in pairs]
        return replace(trace, seen=seen)

    return [until(trace) for trace in ranks]


def _briefly(error: BaseException) -> str:
    return "\n".join(str(error).splitlines()[:8])


def _shown(errors: list[BaseException | None]) -> str:
    lines = [
        f"rank {rank}: {type(error).__name__}: {_briefly(error)}"
        for rank, error in enumerate(errors)
        if error is not None
    ]
    return "\n" + "\n".join(lines) if lines else ""


def _compare(
    true: Trace, ranks: list[Trace], *, whole: bool, by_hand: bool, spread: Spread
) -> None:
    ranks = _joined(ranks)
    for rank, trace in enumerate(ranks):
        for number, steps in enumerate(trace.seen):
            expected = true.seen[number]
            if len(steps) > len(expected) or (whole and len(steps) != len(expected)):
                raise Differs("steps", f"rank {rank}: {len(steps)} steps, not {len(expected)}")
            for place, (step, truth) in enumerate(zip(steps, expected, strict=False)):
                where = f"rank {rank}, optimizer {number}, step {place}"
                _compare_step(step, truth, where, spread)
    if whole:
        for rank, trace in enumerate(ranks):
            _close(trace.final, true.final, f"rank {rank}, at the end", spread)
            _compare_also(trace.also, true.also, rank, spread)
        _bits(ranks)
    elif not by_hand:
        _compare_left(ranks)


def _compare_step(step: Any, truth: Any, where: str, spread: Spread) -> None:
    if len(step[0]) != len(truth[0]):
        raise Differs("evaluations", f"{where}: {len(step[0])}, not {len(truth[0])}")
    for got, expected in zip(step[0], truth[0], strict=True):
        _gradients(got, expected, where, spread)
    _close(step[1], truth[1], where, spread)


def _gradients(got: list[Any], true: list[Any], where: str, spread: Spread) -> None:
    if len(got) != len(true):
        raise Differs("parameters", f"{where}: other parameters")
    norms = [g.abs().norm() for g in true if g is not None]
    floor = FLOOR * torch.stack(norms).norm() if norms else 0.0
    for number, (value, reference) in enumerate(zip(got, true, strict=True)):
        if (value is None) != (reference is None):
            have, had = ("None" if g is None else "a tensor" for g in (value, reference))
            raise Differs("none", f"{where}, gradient {number}: {have}, not {had}")
        if value is None:
            continue
        if value.shape != reference.shape:
            raise Differs("shape", f"{where}, gradient {number}: {value.shape}")
        error = (value - reference).abs().norm()
        allowed = TOLERANCE * max(reference.abs().norm(), floor) + _beside(reference, spread)
        if not error <= allowed + 1e-15:
            text = f"off by {error:.2e}, norm {reference.abs().norm():.2e}, here {value.norm():.2e}"
            raise Differs("gradient", f"{where}, gradient {number}: {text}")


def _close(got: list[Any], true: list[Any], where: str, spread: Spread) -> None:
    if len(got) != len(true):
        raise Differs("weights", f"{where}: {len(got)} weights, not {len(true)}")
    for number, (value, reference) in enumerate(zip(got, true, strict=True)):
        if value.shape != reference.shape or not _within(value, reference, spread):
            raise Differs("weights", f"{where}: weight {number} differs")


def _beside(reference: torch.Tensor, spread: Spread) -> float:
    return TOLERANCE / NUDGE * spread.get(id(reference), 0.0)


def _within(value: torch.Tensor, reference: torch.Tensor, spread: Spread) -> bool:
    if not value.numel():
        return True
    scale = max(1.0, float(reference.abs().max()))
    allowed = TOLERANCE * scale + _beside(reference, spread)
    return bool((value - reference).abs().max() <= allowed)


def _compare_also(
    got: list[torch.Tensor], true: list[torch.Tensor], rank: int, spread: Spread
) -> None:
    if len(got) != len(true):
        raise Differs("shown", f"rank {rank} showed {len(got)} tensors, not {len(true)}")
    for number, (value, reference) in enumerate(zip(got, true, strict=True)):
        if value.shape != reference.shape or not _within(value, reference, spread):
            raise Differs("shown", f"rank {rank}: tensor {number} that was shown differs")


def _bits(ranks: list[Trace]) -> None:
    for rank, trace in enumerate(ranks[1:], start=1):
        pairs = zip(trace.final, ranks[0].final, strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise Differs("bits", f"ranks 0 and {rank} differ by bits")


def _compare_left(ranks: list[Trace]) -> None:
    """After a refusal the weights are those of the last step that was taken."""
    for rank, trace in enumerate(ranks):
        if sum(map(bool, trace.seen)) != 1 or len(trace.seen) != 1:
            continue
        last = trace.seen[0][-1][1]
        # An optimizer may hold its parameters in another order than the modules.
        if [w.shape for w in last] == [w.shape for w in trace.final]:
            _close(trace.final, last, f"rank {rank}, after the refusal", {})


# ---------------------------------------------------------------------- shards


def _joined(ranks: list[Trace]) -> list[Trace]:
    """Whole tensors from the ranks' shards, as far as every rank has them."""
    if not any(isinstance(t, tuple) for trace in ranks for t in _tensors(trace)):
        return ranks
    short = [min(map(len, steps)) for steps in zip(*(t.seen for t in ranks), strict=True)]
    whole = Trace([], ranks[0].also, _join([trace.final for trace in ranks]))
    for number, count in enumerate(short):
        whole.seen.append([])
        for place in range(count):
            steps = [trace.seen[number][place] for trace in ranks]
            notes = zip(*(step[0] for step in steps), strict=True)
            joined = [_join(list(note)) for note in notes]
            whole.seen[-1].append((joined, _join([step[1] for step in steps])))
    return [whole]


def _tensors(trace: Trace) -> list[Any]:
    steps = [step for steps in trace.seen for step in steps]
    return [
        *trace.final,
        *trace.also,
        *(t for step in steps for t in (*step[1], *itertools.chain(*step[0]))),
    ]


def _join(lists: list[list[Any]]) -> list[Any]:
    joined = []
    for parts in zip(*lists, strict=True):
        if isinstance(parts[0], tuple):
            joined.append(torch.cat([part[1] for part in parts]))
        else:
            joined.append(parts[0])
    return joined
