# SPDX-License-Identifier: Apache-2.0
"""`StateCopy`: copies of weights and of optimizers' states, to restore them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from lockstep.sync.optimizer_inspection import load_state, optimizers_with_state
from lockstep.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


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
        self._states: list[dict[str, Any]] = []
        self._groups: list[list[dict[str, Any]]] = []
        self._copy_states()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state of one more optimizer, unless it is copied already."""
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers = optimizers_with_state([*self._optimizers, optimizer])
            self._copy_states()

    def _copy_states(self) -> None:
        for each in self._optimizers[len(self._states) :]:
            self._states.append(copy.deepcopy(each.state_dict()))
            self._groups.append(list(each.param_groups))

    def restore(self) -> None:
        """Write the copies over the tensors, and load the states."""
        self._copies.restore(self._tensors)
        copied = zip(self._optimizers, self._groups, self._states, strict=True)
        for optimizer, groups, state in copied:
            optimizer.param_groups[:] = groups  # without those that were added since
            load_state(optimizer, state)
