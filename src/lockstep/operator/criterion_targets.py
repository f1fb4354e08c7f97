# SPDX-License-Identifier: Apache-2.0
"""What the mean of torch's criterions for classes is over: targets, and not samples.

``CrossEntropyLoss``, ``NLLLoss`` and ``LinearCrossEntropyLoss`` divide by the number of targets
that are not `ignore_index`, each counted by the `weight` of its class (torch's documentation of
them). The default loop weighs the losses of its shards by the same number; weighed by samples they
would be another objective.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lockstep.operator.training_parts import without_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

_FUNCTIONS: Final = (functional.cross_entropy, functional.nll_loss)
_WITH_LAYER: Final[tuple[Any, ...]] = tuple(
    getattr(nn, name) for name in ("LinearCrossEntropyLoss",) if hasattr(nn, name)
)
"""Criterions that compute scores from features with a layer of their own; new in torch 2.13."""

_FORWARDS: Final = tuple(each.forward for each in (nn.CrossEntropyLoss, nn.NLLLoss, *_WITH_LAYER))
_IGNORED: Final = -100
"""The default `ignore_index` of all of them; ``LinearCrossEntropyLoss`` writes it as None."""


class CriterionCall(NamedTuple):
    """A call of the registered criterion by the default loss: which one, and with which target."""

    criterion: Any
    target: Any


def count_targets(call: CriterionCall) -> float | None:
    """The number of targets that a criterion's mean is over; None: the mean is over samples.

    A target of class probabilities counts as a sample, whatever the `weight` of its classes.
    """
    settings = _settings(call.criterion)
    target = call.target
    if settings is None or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    weight, ignored = settings
    target = target.long()  # torch compares uint8 modulo 256, and takes it for a mask as an index
    counted = target != ignored
    if weight is None:
        return float(counted.sum())
    return float(weight.to(target.device, torch.float64)[target[counted]].sum())


def targets_per_sample(calls: Sequence[CriterionCall], num_samples: int) -> float | None:
    """The number of targets of each sample, of which the mean of every one of `calls` is.

    Args:
        num_samples: of the shard for which the calls were; 0 where it is borrowed.

    Returns:
        1 where the means are over samples; None where some mean leaves targets out, counts them by
        their class, or is of samples with another number of targets; and where a target is longer
        than there are samples: flattened, it does not show which targets are one sample's.
    """
    found: set[float] = set()
    for criterion, target in calls:
        settings = _settings(criterion)
        if settings is None or not isinstance(target, torch.Tensor) or target.is_floating_point():
            found.add(1.0)
            continue
        length = len(target) if target.ndim else 1
        is_flattened = 0 < num_samples < length
        if settings[0] is not None or is_flattened or not bool(is_counted(criterion, target).all()):
            return None
        if target.numel():
            found.add(target.numel() / length)
    return found.pop() if len(found) == 1 else None


def computes_scores(criterion: Any) -> bool:
    """Whether `criterion` holds the layer that makes scores of classes from a model's output."""
    return isinstance(criterion, nn.Module) and isinstance(without_wrapper(criterion), _WITH_LAYER)


def is_counted(criterion: Any, target: torch.Tensor) -> torch.Tensor:
    """For each of the targets that are classes, whether `criterion` does not ignore it."""
    settings = _settings(criterion)
    if settings is None or target.is_floating_point():
        return torch.ones_like(target, dtype=torch.bool)
    return target.long() != settings[1]


def ignores_all(criterion: Any, batch: Any) -> bool:
    """Whether `criterion` ignores all of a batch's targets; asked before the batch's forward.

    Of targets on a device False: to look at them is to wait for all that was started there.
    """
    settings = _settings(criterion)
    if settings is None or not isinstance(batch, tuple | list) or not batch:
        return False
    target = batch[-1]
    is_known = isinstance(target, torch.Tensor) and target.device.type == "cpu"
    return is_known and not bool(is_counted(criterion, target).any())


def _settings(criterion: Any) -> tuple[torch.Tensor | None, int] | None:
    """`weight` and `ignore_index`, of a criterion that is a mean over targets."""
    if isinstance(criterion, nn.Module):
        plain: Any = without_wrapper(criterion)
        # A subclass with a `forward` of its own (a focal loss) may take another mean.
        is_torchs = getattr(plain.forward, "__func__", None) in _FORWARDS
        is_mean = is_torchs and plain.reduction == "mean"
        if not is_mean:
            return None
        ignored = plain.ignore_index
        return plain.weight, _IGNORED if ignored is None else ignored
    given = criterion.keywords if isinstance(criterion, partial) else {}
    function = criterion.func if isinstance(criterion, partial) else criterion
    if function not in _FUNCTIONS or given.get("reduction", "mean") != "mean":
        return None
    return given.get("weight"), given.get("ignore_index", _IGNORED)


def reduction_of(criterion: Any) -> Any:
    """The `reduction` of a criterion, of torch's or another one; None if it tells of none."""
    given = criterion.keywords.get("reduction") if isinstance(criterion, partial) else None
    plain = without_wrapper(criterion) if isinstance(criterion, nn.Module) else criterion
    return given or getattr(plain, "reduction", None)
