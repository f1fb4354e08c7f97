# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of optimizers and schedulers, as JSON has values.

They are noted when `setup` has ended: training changes a learning rate, and what a scheduler
counts, and then nobody can tell the one from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from lockstep.operator.training_parts import Hyperparameters, TrainingParts

_LAST_RATES: Final = "_last_lr"
"""What a scheduler's state holds of the rates in effect, which it takes from its optimizer."""


def steppers_of(run: TrainingParts) -> list[Any]:
    """The schedulers and GradScalers whose hyperparameters are read, in this order."""
    return [*run.saved_schedulers(), *run.stepped_by_loop]


def read_hyperparameters(run: TrainingParts) -> Hyperparameters:
    """Those of all optimizers and schedulers, as they are now."""
    return [
        *([to_plain(group) for group in optimizer.param_groups] for optimizer in run.optimizers),
        *([to_plain(stepper.state_dict())] for stepper in steppers_of(run)),
    ]


def to_plain(value: Any) -> Any:
    """`value` as JSON: of a mapping what is plain, as pairs where not all keys are strings."""
    if isinstance(value, Mapping):
        plain = {
            key: to_plain(each)
            for key, each in value.items()
            # Of other keys (parameters) JSON has none.
            if isinstance(key, str | int | float | None) and key != _LAST_RATES and _is_plain(each)
        }
        has_names = all(isinstance(key, str) for key in plain)
        return plain if has_names else sorted(map(list, plain.items()), key=repr)
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value  # of torch or numpy


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        # Tensors in a list may be the group's parameters.
        return all(not isinstance(each, torch.Tensor) and _is_plain(each) for each in value)
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and _is_plain(value.item())
    is_number = isinstance(value, int | float) or (
        isinstance(value, Real) and hasattr(value, "item")  # of numpy
    )
    if is_number:
        return bool(value == value)  # NaN equals no other trial's
    return value is None or isinstance(value, str | Mapping)
