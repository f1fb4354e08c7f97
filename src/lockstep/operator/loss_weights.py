# SPDX-License-Identifier: Apache-2.0
"""What a shard's loss counts for: its samples, or what `compute_loss` says (tokens).

A mean over tokens has to be weighed by tokens. The number goes to the root of backward, where
a batch's samples would, and weighs what is reported of that shard in the same way. One
objective has one kind of weight, so an operator brings it for all of its shards or for none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import (
    ConfigurationError,
    MixedWeightsError,
    NotAvailableError,
    WeightError,
)
from lockstep.keys import NUM_SAMPLES, WEIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.operator import TrainingOperator
    from lockstep.operator.shard_batch import ShardBatch

BY_SAMPLES: Final = "samples"
BY_OWN: Final = f"metrics[{WEIGHT!r}]"

Result = tuple[dict[str, Any], float]
"""What one shard reported, and what it counts for."""


def take_weight(
    operator: TrainingOperator, purpose: str, part: ShardBatch, metrics: dict[str, Any]
) -> float:
    """What the loss of `part` counts for; takes the weight out of its metrics.

    Raises:
        WeightError: it is not a number, negative, NaN or infinite.
        MixedWeightsError: other shards had a weight and this one has none, or the reverse.
        ConfigurationError: the loss is a sum, which has no weight; or the metrics say how many
            samples there are, which the loader does.
        NotAvailableError: the gradients are synchronised by somebody else.
    """
    if NUM_SAMPLES in metrics:
        raise ConfigurationError(
            f"the metrics beside a loss hold {NUM_SAMPLES!r}, which the loader has counted",
            where=f"{type(operator).__name__}.compute_loss",
            got=f"{NUM_SAMPLES}={metrics[NUM_SAMPLES]!r:.60}",
            fix="leave it out; what the loss counts for, instead of samples, is"
            " metrics[lockstep.keys.WEIGHT]",
        )
    is_own = WEIGHT in metrics
    given = metrics.pop(WEIGHT, None)
    weight = _checked(operator, given) if is_own else part.num_samples
    _refuse_mixing(operator, purpose, BY_OWN if is_own else BY_SAMPLES)
    # A borrowed batch is another shard's: whatever it holds is counted there.
    return 0 if part.borrowed else weight


def step_counts(
    operator: TrainingOperator, purpose: str, parts: Sequence[ShardBatch], results: Sequence[Result]
) -> dict[str, Any]:
    """What a step's metrics stand for: samples, and the weight if it is the operator's own."""
    counts: dict[str, Any] = {NUM_SAMPLES: sum(part.num_samples for part in parts)}
    if results and operator._lockstep.weighed_by[purpose] == BY_OWN:
        counts[WEIGHT] = sum(weight for _, weight in results)
    return counts


def partial_weights(results: Sequence[Result]) -> dict[str, float]:
    """The weights of the metrics that some shards of a step reported and others did not.

    Without them such a metric would count for all of its worker's shards, and its mean over
    the steps would depend on who carried what.
    """
    counting = [pair for pair in results if pair[1] > 0]
    if len(counting) < 2:
        return {}
    return {
        key: sum(weight for metrics, weight in counting if key in metrics)
        for key in {key for metrics, _ in counting for key in metrics}
        if any(key not in metrics for metrics, _ in counting)
    }


def _checked(operator: TrainingOperator, given: Any) -> float:
    if operator.loss_reduction == "sum":
        raise ConfigurationError(
            "a loss that is a sum has no weight",
            where=f"{type(operator).__name__}.compute_loss",
            got=f"{BY_OWN} = {given!r:.60}",
            fix=f"return the mean over the tokens, or leave {WEIGHT!r} out of the metrics",
        )
    try:
        weight = float(given)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise WeightError(
            "a loss cannot count for this much",
            where=f"{type(operator).__name__}.compute_loss, rank {operator.world_rank}",
            expected=f"{BY_OWN}: a number from 0 upwards, such as the tokens of the batch",
            got=f"{given!r:.80}",
            fix="return loss, {lockstep.keys.WEIGHT: int(mask.sum())}",
        )
    options, alone = operator._lockstep.context.options, operator._lockstep.context.world_size == 1
    if operator._lockstep.sync is None and not (alone and options.accumulate == 1):
        raise NotAvailableError(
            "a weight needs lockstep's synchronisation, which wrap_ddp=False turned off",
            where=f"{type(operator).__name__}.compute_loss",
            got=f"{BY_OWN} = {weight:g}",
            fix="TorchTrainer(..., wrap_ddp=True)",
        )
    return weight


def _refuse_mixing(operator: TrainingOperator, purpose: str, kind: str) -> None:
    before = operator._lockstep.weighed_by.setdefault(purpose, kind)
    if before != kind:
        raise MixedWeightsError(
            f"some losses are weighed by {BY_SAMPLES} and some by {BY_OWN}",
            where=f"{type(operator).__name__}.compute_loss, rank {operator.world_rank}",
            expected=f"a weight by {before}, as before",
            got=f"a weight by {kind}",
            cause="compute_loss brings the weight for some batches only",
            fix=f"return loss, {{{WEIGHT!r}: number}} for every batch (0 without tokens)",
        )
