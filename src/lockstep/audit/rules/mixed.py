# SPDX-License-Identifier: Apache-2.0
"""What the mixing of gradients, and of weights, says: see `lockstep.audit.diagnoses`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lockstep.audit.diagnoses import CODES, DIAGNOSES, diagnose, ranks, weights
from lockstep.audit.diagnoses.moves import diagnose_moves, diagnose_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.audit.finding import Finding
    from lockstep.audit.rules.base import Code
    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


class OwnScales:
    """Gradients that differ because each rank has divided them by a scale of its own."""

    codes: tuple[Code, ...] = (ranks.SCALE,)

    def judge(self, world: World) -> Iterable[Finding]:
        for track in world.in_step:
            yield from itertools.islice(diagnose(track, (ranks.divided_by_own_scale,)), 1)


class Mixed:
    """Solves what every optimizer used for what autograd brought to the ranks."""

    codes = CODES

    def judge(self, world: World) -> Iterable[Finding]:
        if world.sync_of_lockstep():
            return  # it weighs gradients by what their batches count for
        for track in world.tracks:
            if track not in world.alone:
                yield from itertools.islice(_of(world, track), 1)


def _of(world: World, track: SharedTrack) -> Iterator[Finding]:
    is_compared = track in world.compared
    if not track.returns_to_agreement:
        # Whether samples weigh the same is asked of a rank alone, too.
        yield from diagnose(track, DIAGNOSES if is_compared else (weights.uneven,))
    if is_compared:
        yield from diagnose_weights(track)
        yield from diagnose_moves(track, world.tracks)
