# SPDX-License-Identifier: Apache-2.0
"""Adds each rank's own entries (`operator`, `local`) to a state, and takes one rank's entries out
again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PER_RANK: Final = ("operator", "local")
"""The keys of what each rank may have of its own: what the user's ``state_dict`` returned, and what
`lockstep.local` marks. ``<key>_by_rank`` holds that of all ranks, where it differs."""


def add_every_rank(
    state: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Rank 0's `state`, with what every rank has of its own.

    Args:
        everyone: by rank, the values under keys of `PER_RANK`; the same keys of each rank.
    """
    by_rank = {_name_of(key): [each[key] for each in everyone] for key in everyone[0]}
    return {**state, **by_rank}


def part_of_rank(state: Mapping[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """`state`, with what `rank` had of its own among as many ranks; else rank 0's."""
    own = dict(state)
    for key in PER_RANK:
        by_rank = own.pop(_name_of(key), None)
        if by_rank is not None and len(by_rank) == num_ranks:
            own[key] = by_rank[rank]
    return own


def _name_of(key: str) -> str:
    return f"{key}_by_rank"
