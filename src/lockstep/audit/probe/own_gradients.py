# SPDX-License-Identifier: Apache-2.0
"""A rank's own gradients where a communication hook takes them away.

Elsewhere they are seen when backward returns. Under a wrapper they are the average by then, and
what a hook of the program's own made of them can only be told from what it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.fingerprint import take
from lockstep.audit.prints import Fingerprint
from lockstep.audit.probe.optimizers import CLOSELY

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

_KINDS: Final = ("hashes", "norms", "samples")


def note_own_gradients(probe: Probe, bucket: Any) -> None:
    """What a communication hook of a wrapper is given, before it makes something of it."""
    wanted = {
        id(p): count
        for watched in probe.optimizers.values()
        if watched.track.count < CLOSELY
        for p, count in zip(watched.parameters, watched.counts, strict=True)
    }
    for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if id(param) in wanted:
            probe.own_gradients[id(param)] = take([gradient], [wanted[id(param)]])


def own_gradients(probe: Probe) -> dict[str, Fingerprint]:
    """By optimizer, what its parameters' gradients were when they went into such a hook."""
    held, probe.own_gradients = probe.own_gradients, {}
    found = {}
    for watched in probe.optimizers.values():
        if not any(id(p) in held for p in watched.parameters):
            continue
        parts = [
            held.get(id(p)) or take([None], [count])
            for p, count in zip(watched.parameters, watched.counts, strict=True)
        ]
        found[watched.track.key] = Fingerprint(
            *(np.concatenate([getattr(p, kind) for p in parts]) for kind in _KINDS)
        )
    return found
