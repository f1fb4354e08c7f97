# SPDX-License-Identifier: Apache-2.0
"""Parameters that ranks hold under one name and that are not replicas of one another.

Torch's own types say so themselves (`lockstep.audit.probe.shards`). Where a program cuts its model
up by hand, the work shows it: in a pipeline only some ranks have a loss, and ranks that share the
work on one batch are given the same inputs, and communicate inside backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lockstep.audit.ledger import Step
    from lockstep.audit.world import SharedTrack, World

_REDUCING: Final = ("all_reduce", "reduce")
_STEPS: Final = 3


def apart_by_design(track: SharedTrack) -> frozenset[str]:
    """Names of parameters that nobody reduces, of ranks that do different work.

    Only where what they do shows it: replicas that nobody synchronises are an error.
    """
    if len(track.ranks) < 2 or not track.numbers:
        return frozenset()
    first = track.numbers[0]
    unreduced = {p.name for p in track.parameters if p.wrapper is None} - _reduced(track)
    if not unreduced:
        return frozenset()
    if _only_some_have_a_loss(track.steps(first)):
        return frozenset(unreduced)
    if all(_share_the_work(track.steps(number)) for number in track.numbers[:_STEPS]):
        return frozenset(unreduced & {d.name for d in track.differences("entry", first)})
    return frozenset()


def is_model_parallel(world: World) -> bool:
    """Ranks that share one sample's work read the same samples on purpose."""
    sharded = not any(world.fact("fsdp")) and any(
        p.sharded for led in world.ledgers.values() for t in led.tracks for p in t.parameters
    )
    smaller = any(
        ranks is not None and 1 < len(ranks) < world.size
        for groups in world.fact("subgroups")
        for ranks in groups
    )
    wrappers = any(
        p.wrapper for led in world.ledgers.values() for t in led.tracks for p in t.parameters
    )
    cut_up = any(track.apart for track in world.tracks)
    return (sharded or smaller or cut_up or any(world.fact("all_to_all"))) and not wrappers


def _reduced(track: SharedTrack) -> set[str]:
    steps = [s for number in track.numbers[:_STEPS] for s in track.steps(number).values()]
    calls = [c for s in steps for c in s.collectives if c.op in _REDUCING]
    return {c.parameter for c in calls if c.parameter}


def _only_some_have_a_loss(steps: dict[int, Step]) -> bool:
    """The stages of a pipeline but the last begin backward with what they are sent."""
    losses = [[b.loss for b in s.backwards if b.kind == "backward"] for s in steps.values()]
    without = [all(loss is None for loss in of_rank) for of_rank in losses]
    return all(losses) and any(without) and not all(without)


def _share_the_work(steps: dict[int, Step]) -> bool:
    fed = {step.fed for step in steps.values()}
    talk = all(any(c.in_backward for c in step.collectives) for step in steps.values())
    return talk and len(fed) == 1 and None not in fed
