# SPDX-License-Identifier: Apache-2.0
"""The metrics of one batch, and of one step from its batches."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def class_accuracy(output: Any, target: Any) -> dict[str, torch.Tensor]:
    """``{"val_accuracy": ...}`` for class targets, else nothing.

    Class targets are integers of the output's shape without its dimension 1, which counts
    the classes: output (N, C, ...), target (N, ...). Without this test a regression target
    (N, 1) broadcasts against (N,) predictions into N times N comparisons.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return {}
    if target.is_floating_point() or target.is_complex() or output.dim() < 2:
        return {}
    if target.shape != output.shape[:1] + output.shape[2:] or output.shape[1] < 2:
        return {}
    hits = output.detach().argmax(dim=1) == target
    return {"val_accuracy": hits.to(torch.float64).mean()}


def mean_over_shards(results: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """One step's metrics from its shards': each the mean over the shards that report it.

    Stays on the tensors' device. What is not a number is the first shard's. A shard of weight
    zero (without tokens, and so often without a loss) counts only if all are.
    """
    results = [pair for pair in results if pair[1] > 0] or [(each, 1) for each, _ in results]
    if len(results) == 1:
        return dict(results[0][0])
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for metrics, _ in results for key in metrics):
        values = [(metrics[key], weight) for metrics, weight in results if key in metrics]
        if all(_is_scalar(value) for value, _ in values):
            total = sum(weight for _, weight in values)
            merged[key] = sum(value * (weight / total) for value, weight in values)
        else:
            merged[key] = values[0][0]
    return merged


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)
