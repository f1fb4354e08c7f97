# SPDX-License-Identifier: Apache-2.0
"""Which parts of torch are watched, and where a probe is hooked into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.audit.probe import (
    backwards,
    clipping,
    collectives,
    exchanges,
    loaders,
    models_sent,
    optimizers,
    permutations,
    schedules,
    wrappers,
)

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe


def hook_in(probe: Probe) -> None:
    """Hook everything in that `probe` has to see; it is taken out by its `pause` or `stop`."""
    assert not probe.is_on
    probe.is_on = True
    probe.note_group()
    parts: list[Any] = [backwards, collectives, exchanges, optimizers]
    if probe.run is None or not probe.run.synchronised:
        parts = [wrappers, *parts, clipping, models_sent, schedules]
    if probe.run is None or not probe.run.shares_out:
        parts += [loaders, permutations]
    for part in parts:
        part.install(probe)
