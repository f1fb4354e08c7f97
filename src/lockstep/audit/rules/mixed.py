# SPDX-License-Identifier: Apache-2.0
"""What the mixing of gradients, and of weights, says: see `lockstep.audit.diagnoses`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lockstep.audit.diagnoses import CODES, DIAGNOSES, diagnose, ranks, weights
from lockstep.audit.diagnoses.moves import diagnose_moves, diagnose_weights
from lockstep.audit.rules.base import Rule
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.audit.finding import Finding
    from lockstep.audit.shared_track import SharedTrack


def _look_at_scales(world: World) -> Iterable[Finding]:
    """Gradients that differ because each rank has divided them by a scale of its own."""
    for track in world.in_step:
        yield from itertools.islice(diagnose(track, (ranks.divided_by_own_scale,)), 1)


OWN_SCALES = Rule((ranks.SCALE,), _look_at_scales)


def _look(world: World) -> Iterable[Finding]:
    """Solves what every optimizer used for what autograd brought to the ranks."""
    for track in world.tracks:
        if track not in world.alone:
            yield from itertools.islice(_of(world, track), 1)


MIXED = Rule(CODES, _look, (World.sync_of_lockstep,))


def _of(world: World, track: SharedTrack) -> Iterator[Finding]:
    is_compared = track in world.compared
    if not track.returns_to_agreement:
        # Whether samples weigh the same is asked of a rank alone, too.
        yield from diagnose(track, DIAGNOSES if is_compared else (weights.uneven,))
    if is_compared:
        yield from diagnose_weights(track)
        yield from diagnose_moves(track, world.tracks)
