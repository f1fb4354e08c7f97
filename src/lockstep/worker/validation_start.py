# SPDX-License-Identifier: Apache-2.0
"""`ValidationStart`: what a validation may change, as it was before, to restore it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.operator.registration import registered_parts
from lockstep.sync import buffer_places, copy_buffers, put_buffers
from lockstep.tensor_copies import TensorCopies
from lockstep.tensor_tree import tensors_in
from lockstep.worker.settings_copy import SettingsCopy
from lockstep.worker.user_state_copy import UserStateCopy

if TYPE_CHECKING:
    import torch

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts


class ValidationStart:
    """Copies of what a validation may change, all of which goes back together.

    A validation that an error or a peer's death ends is begun again, also on ranks that had come to
    its end. What it has counted goes back in each case. Where it may change what a checkpoint holds
    (a scheduler that it steps), so do schedulers, settings and the user's own state. Where the
    user's code runs around its loop, it may swap averaged weights in, or estimate running
    statistics anew, and so the models are copied as well, in device memory.

    Args:
        copies_run: False where the run goes back by other means: the counts alone are kept.
    """

    def __init__(self, operator: TrainingOperator, *, copies_run: bool) -> None:
        self._state = operator._lockstep
        self._counts = self._state.mark_counts()
        self._settings: SettingsCopy | None = None
        self._user_state: UserStateCopy | None = None
        self._models: _ModelsCopy | None = None
        if not (copies_run and operator._lockstep_changes_in_validation()):
            return
        run = registered_parts(operator)
        layers = [layer for module in run.modules() for layer in module.modules()]
        self._settings = SettingsCopy(run, list(run.parameters()), layers)
        own: Any = None
        if UserStateCopy.is_possible(operator):
            self._user_state = UserStateCopy(operator)
            own = self._user_state.take()
        if operator._lockstep_surrounds_validation():
            self._models = _ModelsCopy(run, operator.state_dict() if own is None else own)
            self._state.evaluation_writes.copied_elsewhere.update(self._models.weights)

    def restore(self) -> None:
        """Restore everything that was copied."""
        if self._models is not None:
            self._models.restore()
        if self._settings is not None:
            self._settings.restore()
        if self._user_state is not None:
            self._user_state.restore()
        self._state.restore_counts(self._counts)


class _ModelsCopy:
    """Copies of the models and their averages; and which memory they and `own_state` have."""

    def __init__(self, run: TrainingParts, own_state: Any) -> None:
        averaged = [each for average in run.averages for each in average.parameters()]
        self._parameters = [*run.parameters(), *averaged]
        self._buffers = copy_buffers(buffer_places((*run.modules(), *run.averages)))
        self._values = TensorCopies()
        self._values.take(self._parameters)
        # A swap may let parameters and averages exchange their memory, and not the values in it.
        tensors = [*self._parameters, *tensors_in(own_state)]
        self._memory = [(tensor, tensor.data) for tensor in tensors]

    @property
    def weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """The copies of the weights, of models and of averages."""
        return dict(zip(self._parameters, self._values.values, strict=True))

    def restore(self) -> None:
        for tensor, memory in self._memory:
            tensor.data = memory
        self._values.restore(self._parameters)
        put_buffers(self._buffers)
