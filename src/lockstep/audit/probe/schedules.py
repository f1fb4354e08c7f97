# SPDX-License-Identifier: Apache-2.0
"""How often a schedule of the learning rate steps, beside the optimizer whose rate it sets.

Its ``step`` is left alone: what torch says there about the order of steps names the caller's line,
which is to be the program's. Schedules are remembered when they are made, and after each of the
optimizer's steps it is seen how far they have come.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from torch.optim.lr_scheduler import LRScheduler

from lockstep.audit.facts import ScheduleSteps
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.records import Schedule

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from lockstep.audit.facts import Track
    from lockstep.audit.probe.probe import Probe

_MOST: Final = 64


def install(probe: Probe) -> None:
    """Watch the construction of schedules."""
    probe.patches.wrap(LRScheduler, "__init__", probe.afterwards(_remember))


def _remember(probe: Probe, _: Any, args: Any, __: Any) -> None:
    if not probe.is_on or probe.is_elsewhere():
        return
    probe.schedules = [known for known in probe.schedules if known.ref() is not None]
    if len(probe.schedules) < _MOST:
        probe.schedules.append(Schedule(weakref.ref(args[0]), users_lines()))


def note_step(probe: Probe, optimizer: Optimizer, track: Track) -> None:
    """The optimizer has stepped: how often have its schedules since its first step?"""
    moved = []
    for known in probe.schedules:
        schedule = known.ref()
        if schedule is None:
            continue
        # A library's may stand before torch's.
        if getattr(schedule.optimizer, "optimizer", schedule.optimizer) is not optimizer:
            continue
        now = int(schedule.last_epoch)
        if known.began is None:
            known.began = now
        elif now != known.began:
            moved.append((now - known.began, known.where))
    if moved:
        probe.ledger.facts.schedules[track.key] = ScheduleSteps(
            count=sum(count for count, _ in moved), schedules=len(moved), where=moved[0][1]
        )
