# SPDX-License-Identifier: Apache-2.0
"""`EpochEndHook`: a worker calls a module's `on_train_epoch_end` once for an epoch.

Behind the hook the ranks exchange what was logged, and the hook itself may gather. If a peer dies
there, the pass begins again at the epoch's end. The epoch's steps are committed, so that no undo
takes back what the hook has changed. So a hook that has run does not run again; and what a hook
has changed that was interrupted is put back, before it runs again. A worker without peers copies
nothing for that, and a hook that fails there has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.integrations.lightning.unsupported import overrides
from lockstep.operator.in_place_writes import copy_of_weight, write_back
from lockstep.operator.registration import registered_parts
from lockstep.sync import buffer_places, put_buffers
from lockstep.tensor_copies import HostCopy
from lockstep.worker.settings_copy import SettingsCopy

if TYPE_CHECKING:
    from lockstep.integrations.lightning.logging_capture import LoggingCapture
    from lockstep.operator import TrainingOperator


class EpochEndHook:
    """Calls a module's `on_train_epoch_end`.

    Args:
        operator: whose epoch has ended.
        module: whose hook it is.
        logging: counts what the hook logs.
    """

    def __init__(self, operator: TrainingOperator, module: Any, logging: LoggingCapture) -> None:
        self._operator, self._module, self._logging = operator, module, logging

    def is_due(self, epoch: int) -> bool:
        """Whether the module has the hook, and it has not run for `epoch`.

        The same on every rank of a group: a rank for which it has run is the source of the state
        of the others (see `lockstep.operator.writes_behind_steps`).
        """
        behind = self._operator._lockstep.writes_behind_steps
        return behind.ended_epochs <= epoch and overrides(self._module, "on_train_epoch_end")

    def call(self, epoch: int) -> None:
        """Call the hook for `epoch`; with peers an error in it changes no model or setting."""
        behind = self._operator._lockstep.writes_behind_steps
        if not _has_peers(self._operator):
            behind.ended_epochs = epoch + 1
            self._module.on_train_epoch_end()
            return
        start = _Start(self._operator, self._logging)
        try:
            self._module.on_train_epoch_end()
        except BaseException:
            start.restore()
            raise
        behind.ended_epochs = epoch + 1


def _has_peers(operator: TrainingOperator) -> bool:
    return operator._lockstep.context.world_size > 1


class _Start:
    """Copies of what the hook may change, in the host's memory."""

    def __init__(self, operator: TrainingOperator, logging: LoggingCapture) -> None:
        run = registered_parts(operator)
        layers = [layer for module in run.modules() for layer in module.modules()]
        parameters = list(run.parameters())
        self._weights = [(each, HostCopy(copy_of_weight(each))) for each in parameters]
        held = [(place, place.tensor()) for place in buffer_places(run.modules())]
        self._buffers = [
            (place, None if buffer is None else HostCopy(buffer.detach())) for place, buffer in held
        ]
        self._settings = SettingsCopy(run, parameters, layers)
        self._logging, self._mark = logging, logging.mark(may_reset=True)

    def restore(self) -> None:
        for weight, copied in self._weights:
            write_back({weight: copied.on_device()})
        for place, held in self._buffers:
            put_buffers([(place, None if held is None else held.on_device())])
        self._settings.restore()
        self._logging.restore(self._mark)
