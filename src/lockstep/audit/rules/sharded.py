# SPDX-License-Identifier: Apache-2.0
"""Gradients where each rank's optimizer holds a part of all weights.

``fully_shard`` may have been told not to reduce them yet. In ZeRO by hand they may be added up and
scattered, and nobody divides: what its parts are matters not, how long the gradients were that
backward left, that went in, that came out and that were used tells. Or each part is updated from
its owner's gradients alone: the weights are gathered after each step, so replicas agree, but what
was gathered suffices for them and for nothing more, no reduction passed, and the gradients that
backward left, which differ, went nowhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.diagnoses.scale import UNDIVIDED, rate_is_divided
from lockstep.audit.expectation import is_near, is_one_mean, share_one_loss
from lockstep.audit.ledger import SCATTERING
from lockstep.audit.rules.base import Rule, at_step, each_step, named, numbers
from lockstep.audit.rules.gradients import BYPASSED
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Beside, Collective, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack


def _unreduced(track: SharedTrack, number: int) -> Finding | None:
    waiting = {
        r: (s, s.kept_back) for r, s in track.steps(number).items() if s.kept_back is not None
    }
    if not waiting:
        return None
    rank, (step, kept) = next(iter(waiting.items()))
    names = kept.names
    held = len(track.tracks[rank].parameters)
    what = f"all {held} parameters" if 3 < len(names) == held else named(names)
    last = f"the last {kept.backwards} backwards" if kept.backwards > 1 else "the last backward"
    return BYPASSED.finding(
        f"step {number + 1}: when the optimizer stepped, gradients of {what} that "
        f"{last} had left were not reduced: `fully_shard` keeps them back, "
        "this step does without them, and they are added to those of a later step",
        "reduce in the last micro-batch before each step: "
        "`model.set_requires_gradient_sync((i + 1) % k == 0)`, before its forward",
        parameters=names,
        evidence={"reason": "not reduced yet", "backwards": kept.backwards},
        **at_step(track, number, rank=sorted(waiting), where=[*kept.where, *step.where]),
    )


UNREDUCED = each_step((BYPASSED,), _unreduced)
"""Gradients of micro-batches that were still waiting to be reduced when the step came."""


def _undivided(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    size = len(steps)
    if size < track.world_size or not all(_is_own_mean(step) for step in steps.values()):
        return None
    if rate_is_divided(track):
        return None
    is_shared = share_one_loss(b for s in steps.values() for b in s.backwards)
    if is_shared or not all(_used_the_sum(s, size) for s in steps.values()):
        return None
    step = next(iter(steps.values()))
    call = _scatters(step)[0]
    return UNDIVIDED.finding(
        f"step {number + 1}: each rank's loss is a mean over its own batch, `{call.op}` added the "
        f"gradients up over {size} ranks, and the optimizer used its part of the sum undivided: "
        f"{size} times that of the mean over all samples",
        "use op=ReduceOp.AVG, or divide by the world size before the reduce-scatter or after it",
        evidence={"before": call.before, "after": call.after, "ranks": size},
        **at_step(track, number, where=[*call.where, *step.where]),
    )


SCATTERED = each_step((UNDIVIDED,), _undivided, (World.sync_of_lockstep,))
"""Judges steps of optimizers that use what a reduce-scatter left."""


def _scatters(step: Step) -> list[Collective]:
    return [c for c in step.collectives if c.op in SCATTERING and not c.in_backward]


def _is_own_mean(step: Step) -> bool:
    """And nothing came from other ranks, was clipped, scaled or averaged by a wrapper."""
    changed = step.clips or step.scale is not None or step.has_closure
    apart = not any(b.gathered or b.wrappers for b in step.backwards)
    return not changed and apart and is_one_mean(step)


def _used_the_sum(step: Step, size: int) -> bool:
    calls = _scatters(step)
    if not calls or step.gradients is None:
        return False
    if any(c.reduction != "SUM" or len(c.group) != size or not c.after for c in calls):
        return False
    given = math.hypot(*(c.before or 0.0 for c in calls))
    received = math.hypot(*(c.after or 0.0 for c in calls))
    used = math.hypot(*np.nan_to_num(step.gradients.norms))
    left = step.backwards[-1].left
    return is_near(used, received) and any(is_near(given, length) for length in left)


_STEPS: Final = 3
_APART: Final = 1e-3
_FEW: Final = 16
"""Elements that carry losses, counts or norms, and no gradients."""
_PADDED: Final = 1.1
_SILENT: Final = ("barrier", "monitored_barrier")
_OF_ONE_TENSOR: Final = ("all_reduce", "reduce", "broadcast", "all_gather")
"""Without a shape it is one number."""


def _look(world: World) -> Iterable[Finding]:
    """Looks at parameters that no optimizer of a rank holds and that move nevertheless."""
    if any(f.sends for f in world.facts):
        return
    held = (t for t in world.tracks if len(t.ranks) == world.size and t not in world.alone)
    yield from filter(None, map(_judge_unheld, held))


UNHELD = Rule((BYPASSED,), _look, (World.sync_of_lockstep,))


def _judge_unheld(track: SharedTrack) -> Finding | None:
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
        parameters=names,
        evidence={"reason": "updated from the owner's gradients", "norms": norms},
        **at_step(track, number, where=[*backward, *step.where]),
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
