# SPDX-License-Identifier: Apache-2.0
"""`StateCopy`: copies of weights and of optimizers' states, to restore them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

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
