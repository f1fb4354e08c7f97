# SPDX-License-Identifier: Apache-2.0
"""Clipping by a norm that is not the global gradient's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, Explained, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Collective, Step
    from lockstep.audit.world import SharedTrack, World

BEFORE = Code("LS209", "clipped before the reduction", "warning")
TWICE = Code("LS210", "the gradients' norm was counted more than once")

_CLOSE = 1e-4


class Clipping:
    """Compares the norms that ranks clipped by, and what became of a norm that was reduced."""

    codes = (BEFORE, TWICE)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        for track in world.tracks:
            if len(track.ranks) < 2 or track.key in explained.tracks:
                continue
            for number in track.numbers:
                found = _before(track, number) or _twice(track, number)
                if found is not None:
                    yield found
                    break


def _before(track: SharedTrack, number: int) -> Finding | None:
    steps = track.steps(number)
    for at_once in zip(*(s.clips for s in steps.values()), strict=False):
        norms = {rank: clip["norm"] for rank, clip in zip(steps, at_once, strict=True)}
        clipped = any(c["max_norm"] is not None and c["norm"] > c["max_norm"] for c in at_once)
        if clipped and max(norms.values()) - min(norms.values()) > _CLOSE * max(norms.values()):
            return BEFORE.finding(
                f"step {number + 1}: the ranks clipped by different norms ({numbers(norms)}) and "
                "stepped with equal gradients: each clipped its own gradient before the reduction",
                "clip after the last backward of the step has reduced the gradients: between the "
                "synchronising backward (or the all_reduce) and `optimizer.step()`",
                rank=sorted(norms),
                step=number + 1,
                evidence={"norms": {str(r): n for r, n in norms.items()}},
                where=at_once[0]["where"],
            )
    return None


def _twice(track: SharedTrack, number: int) -> Finding | None:
    """The norm of gradients that all ranks share, added up over ranks, and then clipped by."""
    steps = track.steps(number)
    for step in steps.values():
        last = step.backwards[-1].gradients.get(track.key) if step.backwards else None
        if last is None or step.gradients is None:
            continue
        squared = sum(float(n) ** 2 for n in last.norms if n == n)
        after = sum(float(n) ** 2 for n in step.gradients.norms if n == n)
        call = _counted(step, squared)
        if call is not None and after < (1.0 - _CLOSE) * squared:
            size = len(call.group)
            return TWICE.finding(
                f"step {number + 1}: the squared norm of gradients that are already the same on "
                f"all ranks ({squared:.6g}) was added up over {size} ranks, and the gradients were "
                f"made smaller by it: the norm is {size**0.5:.3g} times too large",
                "gradients that are reduced have the global norm on every rank: do not reduce it",
                rank=sorted(steps),
                step=number + 1,
                evidence={"squared_norm": squared, "reduced": call.after, "ranks": size},
                where=call.where,
            )
    return None


def _counted(step: Step, squared: float) -> Collective | None:
    for call in step.collectives:
        if call.op != "all_reduce" or call.reduction != "SUM" or len(call.group) < 2:
            continue
        if call.before is None or call.after is None or call.parameter is not None:
            continue
        was_squared = abs(call.before - squared) <= _CLOSE * squared
        if was_squared and abs(call.after - len(call.group) * squared) <= _CLOSE * call.after:
            return call
    return None
