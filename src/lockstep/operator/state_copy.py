# SPDX-License-Identifier: Apache-2.0
"""Weights, and the states of what steps, as they were: to go back to them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from lockstep.sync import copy_over, overwrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class StateCopy:
    """Copies of tensors, and of the states of optimizers and schedulers.

    Args:
        tensors: parameters and buffers, of any shape, on any device.
        steppers: optimizers and schedulers.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], steppers: Iterable[Any]) -> None:
        self._live = [tensor.detach() for tensor in tensors]
        self._values: list[torch.Tensor] = []
        copy_over(self._live, self._values)
        self._steppers = list(steppers)
        self._states = [copy.deepcopy(each.state_dict()) for each in self._steppers]

    def put_back(self) -> None:
        """Write the copies over the tensors, and load the states."""
        overwrite(self._live, self._values)
        for stepper, state in zip(self._steppers, self._states, strict=True):
            load_state(stepper, state)


def load_state(stepper: Any, state: Mapping[str, Any]) -> None:
    """``stepper.load_state_dict(state)``; an optimizer keeps the very `param_groups` it had.

    torch puts new ones in their place. A user who has kept ``optimizer.param_groups[0]`` to set
    the learning rate by hand would from then on set that of a group which no step reads.

    Args:
        stepper: an optimizer or a scheduler.
        state: of its ``state_dict``; an optimizer keeps its tensors.
    """
    if not isinstance(stepper, torch.optim.Optimizer):
        stepper.load_state_dict(state)
        return
    groups = stepper.param_groups
    stepper.load_state_dict(dict(state))
    for group, settings in zip(groups, stepper.param_groups, strict=True):
        group.clear()
        group.update(settings)
    stepper.param_groups = groups
