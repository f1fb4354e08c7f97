# SPDX-License-Identifier: Apache-2.0
"""`StateCopy`: copies of weights and of optimizers' states, to restore them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from lockstep.sync.optimizer_inspection import inner_optimizers, optimizers_with_state
from lockstep.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class StateCopy:
    """Copies of tensors, and of the states of optimizers and of those within them.

    Args:
        tensors: parameters and buffers, of any shape, on any device.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self._tensors = list(tensors)
        self._copies = TensorCopies()
        self._copies.take(self._tensors)
        self._optimizers = optimizers_with_state(optimizers)
        self._states = [copy.deepcopy(each.state_dict()) for each in self._optimizers]

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state of one more optimizer, unless it is copied already."""
        known = len(self._optimizers)
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers = optimizers_with_state([*self._optimizers, optimizer])
        self._states += [copy.deepcopy(each.state_dict()) for each in self._optimizers[known:]]

    def restore(self) -> None:
        """Write the copies over the tensors, and load the states."""
        self._copies.restore(self._tensors)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            load_state(optimizer, state)


def load_state(stepper: Any, state: Mapping[str, Any]) -> None:
    """``stepper.load_state_dict(state)``; an optimizer keeps the very `param_groups` it had.

    torch puts new ones in their place. A user who has kept ``optimizer.param_groups[0]`` to set
    the learning rate by hand would from then on set that of a group which no step reads. So would
    a scheduler of a wrapper that shares its groups with the optimizer within it.

    Args:
        stepper: an optimizer or a scheduler.
        state: of its ``state_dict``; an optimizer keeps its tensors.
    """
    if not isinstance(stepper, torch.optim.Optimizer):
        stepper.load_state_dict(state)
        return
    inner = inner_optimizers(stepper)
    sharing = [each for each in inner if each.state is stepper.state]
    held = [(each, each.param_groups) for each in (stepper, *inner)]
    stepper.load_state_dict(dict(state))
    for optimizer, groups in held:
        for group, settings in zip(groups, optimizer.param_groups, strict=True):
            if group is not settings:
                group.clear()
                group.update(settings)
        optimizer.param_groups = groups
    for optimizer in sharing:
        optimizer.state = stepper.state
