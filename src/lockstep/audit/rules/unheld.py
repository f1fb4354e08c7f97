# SPDX-License-Identifier: Apache-2.0
"""ZeRO by hand: parts of the weights that each rank updates from its own gradients alone.

The weights are gathered after each step, so replicas agree. What was gathered suffices for them and
for nothing more, and no reduction passed: the gradients that backward left, which differ, went
nowhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.rules.base import named, numbers
from lockstep.audit.rules.gradients import BYPASSED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Beside, Collective, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_STEPS: Final = 3
_APART: Final = 1e-3
_FEW: Final = 16
"""Elements that carry losses, counts or norms, and no gradients."""
_PADDED: Final = 1.1
_SILENT: Final = ("barrier", "monitored_barrier")
_OF_ONE_TENSOR: Final = ("all_reduce", "reduce", "broadcast", "all_gather")
"""Without a shape it is one number."""


class Unheld:
    """Looks at parameters that no optimizer of a rank holds and that move nevertheless."""

    codes = (BYPASSED,)

    def judge(self, world: World) -> Iterable[Finding]:
        if world.sync_of_lockstep() or any(f.sends for f in world.facts):
            return
        for track in world.tracks:
            if len(track.ranks) < world.size or track in world.alone:
                continue
            found = _judge(track)
            if found is not None:
                yield replace(found, optimizer=track.key)


def _judge(track: SharedTrack) -> Finding | None:
    moved = [n for n in track.numbers if _moved_by_its_owner(track, n)]
    if len(moved) < _STEPS:
        return None
    number = moved[0]
    steps, beside = track.steps(number), _beside(track.steps(number))
    step = next(iter(steps.values()))
    places = _apart(beside)
    names = [beside[track.ranks[0]].names[place] for place in places]
    norms = {rank: float(b.gradients.norms[places[0]]) for rank, b in beside.items()}
    backward = step.backwards[-1].where if step.backwards else []
    return BYPASSED.finding(
        f"step {number + 1}: backward left each rank gradients of its own (norm of "
        f"`{names[0]}`'s: {numbers(norms)}), no reduction passed, and what the ranks gathered or "
        f"broadcast is just the weights; yet {named(names)} changed, and alike on all ranks: "
        "each part was updated from the gradients of the one rank whose optimizer holds it",
        "average the gradients before the step: `dist.reduce_scatter_tensor(part, flat, "
        "op=ReduceOp.AVG)`, `dist.reduce` to the owner, or DistributedDataParallel with "
        "ZeroRedundancyOptimizer",
        rank=track.ranks,
        step=number + 1,
        parameters=names,
        evidence={
            "reason": "updated from the owner's gradients",
            "norms": {str(rank): norm for rank, norm in norms.items()},
        },
        where=[*backward, *step.where],
    )


def _moved_by_its_owner(track: SharedTrack, number: int) -> bool:
    steps, later = track.steps(number), track.steps(number + 1)
    now, then = _beside(steps), _beside(later)
    seen = [*now.values(), *then.values()]
    if len(seen) < 2 * len(track.ranks) or len({tuple(b.names) for b in seen}) > 1:
        return False
    before, after = _weights(now), _weights(then)
    if before is None or after is None:
        return False
    apart, sizes = _apart(now), np.array(seen[0].sizes)
    if not apart or not (before != after)[apart].all():
        return False
    held = sum(math.prod(p.shape) for t in track.tracks.values() for p in t.parameters)
    ranks = len(track.ranks)
    # Not where every rank holds copies of all, as of bfloat16 weights in float32.
    if held > _PADDED * sizes.sum() + _FEW * ranks:
        return False
    for rank, step in later.items():
        calls = [*now[rank].within, *step.collectives]
        # The group's own count tells whether all was seen.
        if then[rank].issued - now[rank].issued != len(calls):
            return False
        if not _tell_weights_only(calls, sizes, apart, ranks):
            return False
    return True


def _beside(steps: dict[int, Step]) -> dict[int, Beside]:
    """By rank, what no optimizer holds, if it is known whole."""
    known = {rank: step.beside for rank, step in steps.items() if not step.has_closure}
    return {rank: beside for rank, beside in known.items() if beside is not None and beside.is_all}


def _weights(beside: dict[int, Beside]) -> np.ndarray[Any, Any] | None:
    """What stands for them, if they are the same on all ranks."""
    hashes = np.array([of_rank.weights.hashes for of_rank in beside.values()])
    return hashes[0] if (hashes == hashes[0]).all() else None


def _apart(beside: dict[int, Beside]) -> list[int]:
    """The parameters whose gradients are of other lengths on other ranks."""
    norms = np.array([of_rank.gradients.norms for of_rank in beside.values()])
    spread = norms.max(axis=0) - norms.min(axis=0)
    return [int(n) for n in np.flatnonzero(spread > _APART * norms.max(axis=0))]


def _tell_weights_only(
    calls: list[Collective], sizes: np.ndarray[Any, Any], apart: list[int], ranks: int
) -> bool:
    """Of all weights each rank gathers its part, or all are broadcast, once; and nothing else.

    From the moment in which one step had its gradients to that of the next.
    """
    gathered = broadcast = others = 0
    for call in calls:
        elements = math.prod(call.shape)
        if call.op not in _OF_ONE_TENSOR and not call.shape and call.op not in _SILENT:
            return False  # objects, or tensors whose sizes were not looked at
        if call.op.startswith("all_gather"):
            gathered += elements
        elif call.op == "broadcast":
            broadcast += elements
        elif call.parameter is None:
            others += elements
        else:
            return False
    told = gathered * ranks + broadcast
    few = others <= min(_FEW, sizes.sum() // 8)
    return bool(few and sizes[apart].sum() <= told <= _PADDED * sizes.sum() + _FEW * ranks)
