# SPDX-License-Identifier: Apache-2.0
"""Which ledgers belong together: the launcher's ranks', or those of processes that they started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.facts import ProcessFacts
from lockstep.audit.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

_TWICE: Final = (
    "each of the launcher's ranks started ranks of the same numbers, and only those of the first "
    "were compared (`--nproc-per-node 1` starts the script once)"
)


def with_spawned(own: Sequence[Ledger | None], spawned: Sequence[Ledger]) -> list[Ledger | None]:
    """One ledger for each rank that trained.

    Args:
        own: those of the launcher's ranks; None for one that left none.
        spawned: those of processes that the script started, the first rank's first. One that is
            only a note ("blind") tells that its process trained unseen.

    Returns:
        The launcher's ranks, the processes that they started, or both where the script's first
        process is a rank beside those that it starts. Where a process group was started its
        members alone count; else they are numbered as they come.
    """
    notes = [led for led in spawned if led.facts.blind]
    known = [led for led in spawned if not led.facts.blind]
    grouped = any(led is not None and led.started_group for led in (*own, *known))
    members = [led for led in known if led.started_group or not grouped]
    trains_itself = any(
        led is not None and (led.started_group if grouped else led.tracks) for led in own
    )
    found: list[Ledger | None] = list(own) if trains_itself or not members else []
    if not grouped and members:
        themselves = [led for led in found if led is not None and led.tracks]
        together = [*themselves, *sorted(members, key=lambda led: led.rank)]
        for rank, led in enumerate(together):
            led.rank = rank
        found = list(together)
    elif members:
        taken = {led.rank for led in found if led is not None}
        for led in members:
            if led.rank in taken:
                notes.append(Ledger(facts=ProcessFacts(blind=_TWICE)))
            else:
                taken.add(led.rank)
                found.append(led)
    _keep_notes(found, [*notes, *(led for led in own if led is not None and led not in found)])
    return found


def _keep_notes(found: list[Ledger | None], others: Sequence[Ledger]) -> None:
    """What could not be watched is told by a ledger that stays."""
    first = next((led for led in found if led is not None), None)
    if first is None:
        return
    for facts in (other.facts for other in others):
        first.facts.blind = first.facts.blind or facts.blind
        first.facts.blind_at = first.facts.blind_at or facts.blind_at
        first.facts.unwatched = first.facts.unwatched or facts.unwatched
