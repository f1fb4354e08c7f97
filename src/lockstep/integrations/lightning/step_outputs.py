# SPDX-License-Identifier: Apache-2.0
"""Reads the loss and the metrics from the output of `training_step` or `validation_step`."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.integrations.lightning.unsupported import overrides
from lockstep.keys import WEIGHT
from lockstep.metrics.metric_values import is_scalar

_OUTPUT_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
}
"""The hooks to which Lightning passes the output unchanged."""


def loss_and_metrics(module: Any, step: str, output: Any) -> tuple[Any, dict[str, Any]]:
    """The loss in the `output` of `step`, or None, and each number beside the loss by its name.

    Args:
        step: "training_step" or "validation_step".

    Raises:
        NotAvailableError: the output has an entry that is no number, and the module has no hook
            that would read it.
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
    metrics = {name: detach(value) for name, value in entries.items() if _is_number(value)}
    others = [name for name in entries if name not in metrics]
    if others and not overrides(module, _OUTPUT_HOOKS[step]):
        name, value = others[0], entries[others[0]]
        raise NotAvailableError(
            f"{step} returned {name!r}, which is no number: nobody would read it",
            where=f"{type(module).__name__}.{step}",
            expected="a loss; or a dict of numbers, which train() and validate() return as means"
            " over all samples",
            got=_describe_type(value),
            fix=f"leave {name!r} out, or read it in a hook: def {_OUTPUT_HOOKS[step]}"
            "(self, outputs, batch, batch_idx)",
        )
    return loss, metrics


def detach(output: Any) -> Any:
    """Detach the tensors in `output` from their graph."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {key: detach(value) for key, value in output.items()}
    return output


def _is_number(value: Any) -> bool:
    return is_scalar(value) or isinstance(value, numbers.Real)


def _describe_type(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind
