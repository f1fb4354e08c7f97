# SPDX-License-Identifier: Apache-2.0
"""Replicas whose parameters have another dtype on some ranks than on the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, Rule, at_step, by_rank, named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

DTYPE = Code("LS314", "parameters have different dtypes")


def _look(world: World) -> Iterable[Finding]:
    """Compares the dtypes of the parameters that the optimizers of several ranks hold.

    Numbers that were rounded differently differ: in the first step's weights, in the gradients or
    after the step. So this comes before the rules that would say that.
    """
    # Also of replicas that meet now and then: what is averaged then was rounded differently.
    return filter(None, map(_different, world.compared))


DTYPES = Rule((DTYPE,), _look)


def _different(track: SharedTrack) -> Finding | None:
    apart = _apart(track)
    if not apart or not track.numbers:
        return None
    number = track.numbers[0]
    name, dtypes = next(iter(apart.items()))
    others = sorted({r for of in apart.values() for r in of if of[r] != of[min(of)]})
    return DTYPE.finding(
        f"when step {number + 1} was taken, {named(list(apart))} ({len(apart)} of "
        f"{len(track.parameters)} parameters) had different dtypes (`{name}`: {by_rank(dtypes)}): "
        "the ranks round differently, and drift apart",
        "cast the model on every rank alike. Where a rank is to compute in another dtype, "
        "`torch.autocast` leaves the parameters as they are",
        parameters=list(apart),
        evidence={"dtypes": dtypes},
        **at_step(
            track,
            number,
            rank=others,
            where=[*next(iter(track.steps(number).values())).where, *track.first.where],
        ),
    )


def _apart(track: SharedTrack) -> dict[str, dict[int, str]]:
    """By parameter, the dtype on each rank of a group of replicas in which it is not the same."""
    found: dict[str, dict[int, str]] = {}
    for shared in track.parameters:
        for group in shared.groups:
            held = {r: shared.described[r].dtype for r in sorted(group) if r in shared.described}
            if len(set(held.values())) > 1:
                found.setdefault(shared.name, held)
    return found
