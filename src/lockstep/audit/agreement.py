# SPDX-License-Identifier: Apache-2.0
"""Replicas that drift apart and meet again, at whatever steps: local SGD, federated averaging.

Ranks may take different numbers of steps between two meetings, and make an optimizer for each.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.shared_track import SharedTrack

    State = tuple[int, ...]


def meet_again(tracks: Sequence[SharedTrack]) -> bool:
    """Are all ranks at the same weights once more, after each had been where no other was?

    A rank that is some steps behind is at weights that another one had before: this is no meeting.

    Args:
        tracks: the optimizers of one set of parameters, the first one first.
    """
    if len(tracks[0].ranks) < 2:
        return False
    visited = [_states(tracks, rank) for rank in tracks[0].ranks]
    for place, at_once in enumerate(zip(*visited, strict=False)):
        if len(set(at_once)) == 1:
            continue
        others = [
            set(chain.from_iterable(states for states in visited if states is not own))
            for own in visited
        ]
        if any(state in seen for state, seen in zip(at_once, others, strict=True)):
            return False
        return bool(set.intersection(*(set(states[place + 1 :]) for states in visited)))
    return False


def _states(tracks: Sequence[SharedTrack], rank: int) -> list[State]:
    """What stands for the weights that each step of `rank` began with."""
    found = []
    for track in tracks:
        places = [shared.index[rank] for shared in track.parameters if rank in shared.index]
        for number in track.numbers_of(rank):
            step = track.step(rank, number)
            if step is not None and step.entry is not None and len(step.entry.hashes):
                found.append(tuple(int(step.entry.hashes[place]) for place in places))
    return found
