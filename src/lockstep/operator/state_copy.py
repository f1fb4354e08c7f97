# SPDX-License-Identifier: Apache-2.0
"""`StateCopy`: copies of weights, and of optimizers' states and attributes, to restore them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from lockstep.operator.attributes_copy import AttributesCopy
from lockstep.sync.optimizer_inspection import (
    inner_optimizers,
    load_state,
    optimizers_with_state,
)
from lockstep.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class StateCopy:
    """Copies of tensors, and of what optimizers and those within them hold.

    Args:
        tensors: parameters and buffers, of any shape, on any device.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self._tensors = list(tensors)
        self._copies = TensorCopies()
        self._copies.take(self._tensors)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._states: list[dict[str, Any]] = []
        self._groups: list[list[dict[str, Any]]] = []
        self._attributes: list[AttributesCopy] = []
        self._copy_states(optimizers)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state of one more optimizer, unless it is copied already."""
        if not any(optimizer is each for each in self._optimizers):
            self._copy_states([optimizer])

    def _copy_states(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        added = list(optimizers)
        self._optimizers = optimizers_with_state([*self._optimizers, *added])
        for each in self._optimizers[len(self._states) :]:
            self._states.append(copy.deepcopy(each.state_dict()))
            self._groups.append(list(each.param_groups))
        # Those within them, too, that share the state of another one.
        within = [inner for each in added for inner in inner_optimizers(each)]
        self._attributes += [
            AttributesCopy(each, self._optimizers, self._tensors)
            for each in dict.fromkeys([*added, *within])
        ]

    def restore(self) -> None:
        """Write the copies over the tensors and attributes, and load the states."""
        self._copies.restore(self._tensors)
        copied = zip(self._optimizers, self._groups, self._states, strict=True)
        for optimizer, groups, state in copied:
            optimizer.param_groups[:] = groups  # without those that were added since
            load_state(optimizer, state)
        for attributes in self._attributes:
            attributes.restore()
