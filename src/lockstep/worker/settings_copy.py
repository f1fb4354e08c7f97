# SPDX-License-Identifier: Apache-2.0
"""`SettingsCopy`: the settings of a run that a loop may change, to undo its step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.operator.training_parts import TrainingParts


class SettingsCopy:
    """Schedulers' states, the optimizers' settings (learning rates), and which parameters train.

    Two networks that take turns freeze each other: an interrupted step must not leave one frozen.
    """

    def __init__(self, run: TrainingParts) -> None:
        self._run = run
        self._schedulers = [copy.deepcopy(each.state_dict()) for each in run.schedulers]
        self._groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in run.optimizers)
        ]
        self._requires_grad = [parameter.requires_grad for parameter in run.parameters()]

    def restore(self) -> None:
        pairs = zip(self._run.parameters(), self._requires_grad, strict=True)
        for parameter, requires_grad in pairs:
            parameter.requires_grad_(requires_grad)
        for scheduler, state in zip(self._run.schedulers, self._schedulers, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._run.optimizers, self._groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                for new in group.keys() - settings.keys() - {"params"}:
                    del group[new]
                group.update(settings)
