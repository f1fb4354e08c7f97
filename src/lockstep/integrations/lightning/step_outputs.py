# SPDX-License-Identifier: Apache-2.0
"""What `training_step` and `validation_step` are given, and what is read from their outputs."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.errors import ConfigurationError
from lockstep.keys import WEIGHT
from lockstep.metrics.metric_values import is_scalar


def loss_and_metrics(module: Any, step: str, output: Any) -> tuple[Any, dict[str, Any]]:
    """The loss in the `output` of `step`, or None, and each number beside the loss by its name.

    What is no number is for the module's hooks, if any reads it, as with Lightning.

    Args:
        step: "training_step" or "validation_step".

    Raises:
        ConfigurationError: a weight, from a module that backpropagates by itself.
    """
    entries = dict(output) if isinstance(output, Mapping) else {"loss": output}
    if step == "training_step" and WEIGHT in entries and not module.automatic_optimization:
        raise ConfigurationError(
            "training_step returned a weight, which comes too late for its gradients",
            where=f"{type(module).__name__}.training_step",
            cause="manual_backward has weighed them already",
            fix="self.manual_backward(loss, weight=number), for the mean of what is logged"
            f" self.log(name, value, batch_size=number), and no {WEIGHT!r}",
        )
    loss = entries.pop("loss", None)
    if step == "validation_step" and loss is not None:
        # A loss without a name gets the name that RaySGD gave it.
        entries.setdefault("val_loss", loss)
    metrics = {
        name: detach(value)
        for name, value in entries.items()
        if _is_number(value) or name == WEIGHT  # which is refused by name where it is none
    }
    return loss, metrics


def step_arguments(step: Any, batch: Any, index: int) -> tuple[Any, ...]:
    """The arguments for the step method `step`, whose signature may have no `batch_idx`."""
    takes = inspect.signature(step).parameters.values()
    positional = [each for each in takes if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    several = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in positional)
    return (batch, index) if several or len(positional) > 1 else (batch,)


def detach(output: Any) -> Any:
    """Detach the tensors in `output` from their graph."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {key: detach(value) for key, value in output.items()}
    return output


def _is_number(value: Any) -> bool:
    # Of a tensor with a row for each sample, one row is no metric either.
    is_tensor = is_scalar(value) and value.ndim == 0
    return is_tensor or isinstance(value, numbers.Real)
