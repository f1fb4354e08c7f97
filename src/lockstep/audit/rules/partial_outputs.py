# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism by hand: partial outputs whose sum is summed again in backward.

Where ranks share the work on one sample, they all compute the same loss from the sum. The gradient
that reaches it is the same on all of them already, and each rank's part needs just that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.diagnoses.scale import rate_is_divided
from lockstep.audit.expectation import COMPUTED_ALIKE, are_equal, is_one_mean, share_one_loss
from lockstep.audit.rules.base import at_step, each_step
from lockstep.audit.rules.gathers import WRONG
from lockstep.audit.rules.left_by_backward import uses_what_backward_left
from lockstep.audit.world import World

if TYPE_CHECKING:
    from lockstep.audit.facts import Backward, Gathered, Step
    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack


def _judge_step(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    if track.fed(number) != "same" or not _share_one_mean(track, steps) or rate_is_divided(track):
        return None
    backwards = [step.backwards[-1] for step in steps.values()]
    size = len(steps)
    for facts in zip(*(b.gathered for b in backwards), strict=False):
        if _grew(facts, size):
            return _as_finding(track, number, facts[0], backwards[0])
    return None


PARTIAL_OUTPUTS = each_step((WRONG,), _judge_step, (World.sync_of_lockstep,))
"""Judges sums with a gradient in models of which each rank holds its own pieces."""


def _share_one_mean(track: SharedTrack, steps: dict[int, Step]) -> bool:
    """One mean on all ranks, whose gradients are used as they came."""
    if not track.apart or len(steps) < track.world_size:
        return False
    if not all(is_one_mean(s) and len(s.backwards) == 1 for s in steps.values()):
        return False
    return share_one_loss(b for s in steps.values() for b in s.backwards) and all(
        not s.backwards[-1].wrappers and uses_what_backward_left(s, track.key)
        for s in steps.values()
    )


def _grew(facts: tuple[Gathered, ...], size: int) -> bool:
    """Did each rank give the same gradient in, and get back all of them together?"""
    if any(f.group != size or f.shape != facts[0].shape for f in facts):
        return False
    given = [f.given or 0.0 for f in facts]
    whole = [(f.given_back or 0.0) / size for f in facts]
    if all(given) and all(f.op == "all_gather" for f in facts):
        return all(are_equal(each, COMPUTED_ALIKE) for each in zip(given, whole, strict=True))
    if any(f.op != "all_reduce" or f.reduction != "SUM" for f in facts):
        return False
    return bool(given[0]) and are_equal([*given, *whole], COMPUTED_ALIKE)


def _as_finding(track: SharedTrack, number: int, fact: Gathered, backward: Backward) -> Finding:
    size = fact.group
    return WRONG.finding(
        f"step {number + 1}: an {fact.op} puts the ranks' parts of an output together, and its "
        f"backward adds up over ranks; all {size} ranks compute the same loss from the whole, so "
        f"that its gradient was the same on all of them already: what comes before it gets {size} "
        "times its gradient",
        "give the gradient back as it is: an autograd Function that communicates in its forward "
        "and returns `grad` in its backward, after a gather this rank's part of it",
        evidence={
            "rows": fact.shape,
            "ranks": size,
            "given": fact.given,
            "given_back": fact.given_back,
        },
        **at_step(track, number, where=[*fact.where, *backward.where]),
    )
