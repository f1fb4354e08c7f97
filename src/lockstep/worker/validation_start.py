# SPDX-License-Identifier: Apache-2.0
"""`ValidationStart`: the models before a validation of the user's own, to restore them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.operator.registration import registered_parts
from lockstep.sync import buffer_places, copy_buffers, put_buffers
from lockstep.tensor_copies import TensorCopies
from lockstep.tensor_tree import tensors_in
from lockstep.worker.settings_copy import SettingsCopy
from lockstep.worker.user_state_copy import UserStateCopy

if TYPE_CHECKING:
    import torch

    from lockstep.operator import TrainingOperator


class ValidationStart:
    """Copies of what an overridden `validate` may change, in device memory.

    A validation swaps averaged weights in, estimates running statistics anew, or steps a scheduler.
    An error, or a peer's death, may end it before it has swapped them back; and it runs again on
    ranks that had come to its end.
    """

    def __init__(self, operator: TrainingOperator) -> None:
        run = registered_parts(operator)
        layers = [layer for module in run.modules() for layer in module.modules()]
        parameters = list(run.parameters())
        averaged = [each for average in run.averages for each in average.parameters()]
        self._settings = SettingsCopy(run, parameters, layers)
        self._buffers = copy_buffers(buffer_places((*run.modules(), *run.averages)))
        self._parameters = [*parameters, *averaged]
        self._values = TensorCopies()
        self._values.take(self._parameters)
        self._user_state = UserStateCopy(operator) if UserStateCopy.is_possible(operator) else None
        own = operator.state_dict() if self._user_state is None else self._user_state.take()
        # A swap may let parameters and averages exchange their memory, and not the values in it.
        tensors = [*self._parameters, *tensors_in(own)]
        self._memory = [(tensor, tensor.data) for tensor in tensors]

    @property
    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """The copies of the weights, of models and of averages."""
        return dict(zip(self._parameters, self._values.values, strict=True))

    def restore(self) -> None:
        """Restore everything that was copied."""
        for tensor, memory in self._memory:
            tensor.data = memory
        self._values.restore(self._parameters)
        put_buffers(self._buffers)
        self._settings.restore()
        if self._user_state is not None:
            self._user_state.restore()
