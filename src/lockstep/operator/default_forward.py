# SPDX-License-Identifier: Apache-2.0
"""The default `compute_loss` and `predict_batch` of an operator, and the class accuracy."""

from __future__ import annotations

from typing import Any, Final

import torch

from lockstep.errors import ConfigurationError
from lockstep.operator.criterion_targets import (
    CriterionCall,
    computes_scores,
    is_counted,
    reduction_of,
)
from lockstep.operator.loop_protocols import Operator
from lockstep.operator.registration import registered_parts

ACCURACY: Final = "val_accuracy"


def require_single(operator: Operator, attribute: str, items: list[Any]) -> Any:
    """`self.model` (or `.optimizer`, `.criterion`); else the only registered one, else an error."""
    found = getattr(operator, attribute, None)
    if found is None and len(items) == 1:
        found = items[0]
    if found is None:
        none = f"register({attribute}=...), or override compute_loss"
        several = (
            f"set self.{attribute} in setup, or override compute_loss (one optimizer)"
            " or train_batch (several)"
        )
        raise ConfigurationError(
            f"the default loop needs self.{attribute}, and {len(items) or 'none'} was registered",
            where=type(operator).__name__,
            fix=several if items else none,
        )
    return found


def default_loss(operator: Operator, batch: Any) -> tuple[torch.Tensor, Any, Any]:
    """Loss, output and target of a batch ``(*features, target)``."""
    run = registered_parts(operator)
    model = require_single(operator, "model", run.models)
    criterion = require_single(operator, "criterion", [run.criterion] if run.criterion else [])
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ConfigurationError(
            "the default compute_loss does not understand this batch",
            where=type(operator).__name__,
            expected="(*features, target)",
            got=describe_value(batch),
            fix="override compute_loss(self, batch, batch_info)",
        )
    _refuse_criterion_reduction(operator, criterion)
    *features, target = batch
    output = model(*features)
    loss = criterion(output, target)
    state = operator._lockstep
    state.global_batch.criterion_calls.append(CriterionCall(criterion, target))
    state.registered_metrics.observe(state.global_batch.purpose, output, target)
    return loss, output, target


def _refuse_criterion_reduction(operator: Operator, criterion: Any) -> None:
    """Refuse a criterion that is a sum where the operator's loss is a mean, or the reverse."""
    reduction, stated = reduction_of(criterion), operator.loss_reduction
    if reduction not in ("mean", "sum") or reduction == stated:
        return
    if operator._lockstep_overrides(Operator.compute_loss):
        return  # it may divide the sum, or multiply the mean
    raise ConfigurationError(
        f"the criterion is a {reduction}, and the operator's loss is to be a {stated}",
        where=type(operator).__name__,
        got=f"{criterion!r:.80}",
        cause="what each worker computes would be added up as something else than it is",
        fix=f'loss_reduction = "{reduction}" in the operator, or a criterion with'
        f' reduction="{stated}"',
    )


def default_prediction(operator: Operator, batch: Any) -> Any:
    """The model's output for a batch as `default_loss` takes it, or one without a target."""
    run = registered_parts(operator)
    # No gradient, no wrapper: the user's own DDP would wait for ranks that have no batch left.
    models = run.models if operator._lockstep.context.options.wrap_ddp else run.plain_models()
    model = models[0] if len(models) == 1 else require_single(operator, "model", models)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    if not isinstance(batch, tuple | list) or not batch:
        raise ConfigurationError(
            "the default predict_batch does not understand this batch",
            where=type(operator).__name__,
            expected="(*features, target), (feature,) or a tensor",
            got=describe_value(batch),
            fix="override predict_batch(self, batch, batch_info)",
        )
    return model(*(batch if len(batch) == 1 else batch[:-1]))


def describe_value(value: Any) -> str:
    """The type of `value` for a message; a tensor's shape and dtype, and a dict's keys, too."""
    if isinstance(value, dict) and value:
        return f"{type(value).__name__} with keys {sorted(map(str, value))}"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"


def class_accuracy(criterion: Any, output: Any, target: Any) -> dict[str, torch.Tensor]:
    """``{"val_accuracy": ...}`` for class targets, else nothing: over those it does not ignore.

    Class targets are integers of the output's shape without its dimension 1, which counts
    the classes: output (N, C, ...), target (N, ...). Without this test a regression target
    (N, 1) broadcasts against (N,) predictions into N times N comparisons. Nothing, too, where the
    criterion makes the scores: the output holds features, which may be as many as the classes.
    """
    if computes_scores(criterion):
        return {}
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return {}
    if target.is_floating_point() or target.is_complex() or output.dim() < 2:
        return {}
    if target.shape != output.shape[:1] + output.shape[2:] or output.shape[1] < 2:
        return {}
    counted = is_counted(criterion, target)
    hits = (output.detach().argmax(dim=1) == target) & counted
    return {ACCURACY: hits.sum().to(torch.float64) / counted.sum()}
