# SPDX-License-Identifier: Apache-2.0
"""What the summary in a terminal and the page say with the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.audit.shared_track import TABLE_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.world import World


def many(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'s' * (count != 1)}"


def cut(rows: Sequence[Any]) -> str:
    """Of a table or a curve of steps: that it may go on."""
    return f", the first {TABLE_ROWS} steps" if len(rows) == TABLE_ROWS else ""


def verdict(world: World, *, has_left_out: bool) -> str:
    """Where nothing graver than a notice was found."""
    if world.has_failed():
        return f"the run failed ({_failures(world)}); nothing else was found until then"
    if world.size == 1 and world.steps:
        return (
            "one process trained, so there was nothing to compare; run it on two: "
            "lockstep audit --nproc-per-node 2 ..."
        )
    if not world.steps:
        return "no optimizer step was seen, so nothing was compared"
    return "nothing else was found" if has_left_out else "in lockstep"


def unseen_in_words(world: World) -> str:
    """``could not look at everything, e.g. ...``; empty where it could."""
    return f"could not look at everything, e.g. {world.unseen[0]}" if world.unseen else ""


def _failures(world: World) -> str:
    failed = {
        rank: led for rank, led in world.ledgers.items() if led.failure is not None or led.exit_code
    }
    lost = [
        f"rank {rank} left no record" for rank in range(world.size) if rank not in world.ledgers
    ]
    return "; ".join([*(f"rank {r} {led.standing}" for r, led in failed.items()), *lost])
