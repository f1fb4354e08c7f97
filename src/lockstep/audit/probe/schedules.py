# SPDX-License-Identifier: Apache-2.0
"""How often a schedule of the learning rate steps, beside the optimizer whose rate it sets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from torch.optim.lr_scheduler import LRScheduler

from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

FACT: Final = "schedules"


def install(probe: Probe) -> None:
    """Watch the ``step`` that most schedules inherit."""
    probe.patches.wrap(LRScheduler, "step", functools.partial(_stepper, probe))


def _stepper(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if probe.is_on and not probe.is_elsewhere():
            probe.harmlessly(_note, probe, self)
        return original(self, *args, **kwargs)

    return watched


def _note(probe: Probe, schedule: Any) -> None:
    watched = probe.optimizers.get(getattr(schedule.optimizer, "optimizer", schedule.optimizer))
    if watched is None or not watched.track.count:
        return  # the step that a schedule takes when it is made
    of_all = probe.ledger.facts.setdefault(FACT, {})
    noted = of_all.setdefault(watched.track.key, {"count": 0, "schedules": [], "where": []})
    noted["count"] += 1
    # Two schedules of one optimizer step as often together; which is which does not matter.
    if id(schedule) not in noted["schedules"]:
        noted["schedules"].append(id(schedule))
    noted["where"] = noted["where"] or users_lines()
