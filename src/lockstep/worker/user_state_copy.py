# SPDX-License-Identifier: Apache-2.0
"""`UserStateCopy`: what the user's own `state_dict` holds, copied before a step that may be undone.

A reward baseline, a queue of embeddings, a hand-written average: a step that is computed again must
find them as it found them the first time, or its gradient is another one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from lockstep.operator import TrainingOperator
from lockstep.tensor_copies import TensorCopies
from lockstep.tensor_tree import tensors_in, tree_map
from lockstep.worker.state_dict import uncopied_state_error

if TYPE_CHECKING:
    from collections.abc import Iterator


class UserStateCopy:
    """Copies of an operator's own state; the tensors' memory is used again by the next `take`."""

    def __init__(self, operator: TrainingOperator) -> None:
        self._operator = operator
        self._tensors = TensorCopies()
        self._rest: Any = None

    @staticmethod
    def is_possible(operator: TrainingOperator) -> bool:
        """Whether the operator has a state of its own, and can take it back."""
        own = operator._lockstep_overrides
        return own(TrainingOperator.state_dict) and own(TrainingOperator.load_state_dict)

    @staticmethod
    def is_needed(operator: TrainingOperator) -> bool:
        """Whether it is possible, and the state is undone with each step."""
        # A call of the user's own `train_epoch` is undone as a whole, with a state from before it.
        has_own_epoch = operator._lockstep_overrides(TrainingOperator.train_epoch)
        return UserStateCopy.is_possible(operator) and not has_own_epoch

    def take(self) -> Any:
        """Copy what the operator's `state_dict` returns now; returns that itself."""
        state = self._operator.state_dict()
        self._tensors.take(list(tensors_in(state)))
        try:
            self._rest = tree_map(_without_tensor, state)
        except TypeError as error:
            raise uncopied_state_error(self._operator, error) from error
        return state

    def value(self) -> Any:
        """A copy of what the operator's `state_dict` returned at the last `take`."""
        values = iter(self._tensors.values)
        return tree_map(lambda leaf: _filled(leaf, values), self._rest)

    def restore(self) -> None:
        """Give the operator back what its `state_dict` returned at the last `take`."""
        if self._rest is not None:  # as where a checkpoint is loaded
            self._operator.load_state_dict(self.value())


class _Tensor:
    """Stands for a tensor in a state whose tensors are copied apart."""


_TENSOR = _Tensor()


def _without_tensor(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _filled(leaf: Any, values: Iterator[torch.Tensor]) -> Any:
    # The operator may keep what it is given, and the copies' memory is used again.
    return next(values).clone() if leaf is _TENSOR else copy.deepcopy(leaf)
