# SPDX-License-Identifier: Apache-2.0
"""`ScheduleCopies`: copies of what learning-rate schedulers change, to undo their steps."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.operator.training_parts import TrainingParts


class ScheduleCopies:
    """Copies of what schedulers change: their own states, and the optimizers' learning rates."""

    def __init__(self, run: TrainingParts) -> None:
        self._run = run
        self._schedulers = [copy.deepcopy(each.state_dict()) for each in run.schedulers]
        self._groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in run.optimizers)
        ]

    def restore(self) -> None:
        for scheduler, state in zip(self._run.schedulers, self._schedulers, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._run.optimizers, self._groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                for new in group.keys() - settings.keys() - {"params"}:
                    del group[new]
                group.update(settings)
