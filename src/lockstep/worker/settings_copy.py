# SPDX-License-Identifier: Apache-2.0
"""`LayersCopy` and `SettingsCopy`: settings of a run that a step may change, to undo the step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.amp import GradScaler

from lockstep._torch_compat.scaler_copy import ScalerCopy
from lockstep.operator.group_settings_copy import GroupSettingsCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from lockstep.operator.training_parts import TrainingParts


class LayersCopy:
    """Which parameters train, and the modes of layers.

    A loss may freeze a network for a part of it, and two networks that take turns freeze each
    other, or evaluate each other in ``eval()``: a step that is interrupted in between must not
    leave them so.

    Args:
        parameters: those that a step may freeze.
        layers: all modules in the models; to find these takes too long for every step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Module]) -> None:
        self._parameters = parameters
        self._layers = layers
        self._requires_grad = [parameter.requires_grad for parameter in parameters]
        self._modes = [layer.training for layer in layers]

    def restore_layers(self) -> None:
        """Restore which parameters train, and the modes of layers."""
        for parameter, requires_grad in zip(self._parameters, self._requires_grad, strict=True):
            parameter.requires_grad_(requires_grad)
        for layer, training in zip(self._layers, self._modes, strict=True):
            layer.training = training

    def restore(self) -> None:
        """Restore everything that was copied."""
        self.restore_layers()


class SettingsCopy(LayersCopy):
    """Also the states of schedulers and of the loop's own GradScalers, and optimizers' settings.

    With schedulers goes what notes their steps: one that steps again must not count as done.

    Args:
        run: has them.
        parameters, layers: see `LayersCopy`.
    """

    def __init__(
        self,
        run: TrainingParts,
        parameters: Sequence[nn.Parameter],
        layers: Sequence[nn.Module],
    ) -> None:
        super().__init__(parameters, layers)
        self._run = run
        steppers = [*run.saved_schedulers(), *run.stepped_by_loop]
        self._scalers = [ScalerCopy(each) for each in steppers if _is_plain_scaler(each)]
        plain = [each for each in steppers if not _is_plain_scaler(each)]
        self._schedulers = [*plain, *run.scheduler_records]
        self._states = [copy.deepcopy(each.state_dict()) for each in self._schedulers]
        self._groups = GroupSettingsCopy(run.optimizers)

    def put_into(self, state: dict[str, Any], take: Callable[[Any], Any]) -> None:
        """Put what was copied of schedulers and optimizers' settings into a `state` of the run.

        Args:
            take: copies values for the state.
        """
        known = dict(zip(map(id, self._schedulers), self._states, strict=True))
        run = self._run
        members = {"schedulers": run.saved_schedulers(), "stepped_by_loop": run.stepped_by_loop}
        for key, steppers in members.items():
            for place, stepper in enumerate(steppers):
                if id(stepper) in known:
                    state[key][place] = take(known[id(stepper)])
        self._groups.put_into(state, take)

    def restore(self) -> None:
        super().restore()
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(state)
        for scaler in self._scalers:
            scaler.restore()
        self._groups.restore()


class StepSettings:
    """The settings of optimizers before a step of the default loop, whose losses may change them.

    What the program sets between two batches, or two calls, is no part of the step, and stays.

    Args:
        optimizers: none where no loss of the user's own runs, and in loops with a `SettingsCopy`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = self._behind_batch = GroupSettingsCopy(optimizers)

    def end_batch(self) -> None:
        """Note what a batch of the step has left."""
        self._behind_batch = GroupSettingsCopy(self._optimizers)

    def begin_batch(self) -> None:
        """Before a further batch of the step: take over what was set since the one before."""
        now = GroupSettingsCopy(self._optimizers)
        if not now.has_values_of(self._behind_batch):
            self._before = self._before.with_changes(self._behind_batch, now)

    def put_into(self, state: dict[str, Any], take: Callable[[Any], Any]) -> None:
        """See `GroupSettingsCopy.put_into`."""
        self._before.put_into(state, take)

    def restore(self) -> None:
        """Restore what was copied."""
        self._before.restore()


def _is_plain_scaler(stepper: object) -> bool:
    """Whether it is a GradScaler with no state but torch's."""
    if not isinstance(stepper, GradScaler):
        return False
    return type(stepper).state_dict is GradScaler.state_dict
