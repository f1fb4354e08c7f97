# SPDX-License-Identifier: Apache-2.0
"""`ShardResults`: the metrics and weights of a batch's shards, and the batch's metrics from them.

The weight of a shard's loss is its number of samples (of targets, where the criterion of the
default loss is a mean over targets), or the number that `compute_loss` returns (tokens). A mean
over tokens has to be weighed by tokens: the root of backward carries that number instead of the
samples. The shard's metrics have the weight that `compute_loss` returned; without one they are
means over samples, but for the loss. One objective has one kind of weight, so an operator returns
it for all of its shards or for none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import (
    ConfigurationError,
    MixedWeightsError,
    WeightError,
)
from lockstep.keys import NUM_SAMPLES, WEIGHT
from lockstep.metrics.metric_values import (
    addable,
    as_summand,
    is_same_value,
    is_scalar,
    shape_of,
)
from lockstep.operator.batch_refusals import weight_without_sync_error
from lockstep.operator.criterion_targets import count_targets, is_counted, targets_per_sample
from lockstep.operator.loop_protocols import Operator, rank_and_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.operator.criterion_targets import CriterionCall
    from lockstep.operator.shard_batch import ShardBatch

BY_SAMPLES: Final = "samples"
BY_TARGETS: Final = "targets"
"""As samples, once a target was seen that the criterion ignores, or counts by its class."""
BY_OWN: Final = f"metrics[{WEIGHT!r}]"


class ShardResults:
    """The results of one global batch's shards on this worker.

    Args:
        operator: its loop computes the batch.
        purpose: "train" or "validation"; each has its own kind of weight.
    """

    def __init__(self, operator: Operator, purpose: str) -> None:
        self._operator = operator
        self._purpose = purpose
        self._shards: list[int] = []
        self._results: list[tuple[dict[str, Any], float]] = []
        self._loss = "train_loss" if purpose == "train" else "val_loss"
        self._weights: list[dict[str, float]] = []  # of metrics that may count other things
        self._num_samples = 0

    def weight_of(self, shard: ShardBatch, metrics: dict[str, Any], moved: Any = None) -> float:
        """The weight of the loss of `shard`, which is taken out of its metrics.

        Args:
            moved: the shard's batch on the device, from which the loss was computed.

        Raises:
            WeightError: it is not a number, negative, NaN or infinite.
            MixedWeightsError: other shards had a weight and this one has none, or the reverse.
            ConfigurationError: the loss is a sum, which has no weight; or the metrics say how many
                samples there are, which the loader does.
            NotAvailableError: the user's own wrapper synchronises the gradients.
        """
        operator = self._operator
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
        weight, kind = (
            (_parse_weight(operator, given), BY_OWN) if is_own else self._count(shard, moved)
        )
        _note_kind(operator, self._purpose, kind)
        # The worker that owns the samples of a borrowed batch counts them.
        return 0 if shard.is_borrowed else weight

    def _count(self, shard: ShardBatch, moved: Any) -> tuple[float, str]:
        """The targets that the mean of the default loss is over; for another loss, the samples."""
        state = self._operator._lockstep
        calls = state.global_batch.criterion_calls
        has_own_wrapper = state.sync is None and state.context.world_size > 1
        if not calls or has_own_wrapper:
            return shard.num_samples, BY_SAMPLES
        if len(calls) > 1:  # none of them is the loss
            per_sample = targets_per_sample(calls, shard.num_samples)
            if per_sample is None:
                raise _several_calls_error(self._operator, len(calls))
            return shard.num_samples * per_sample, BY_SAMPLES
        call = self._call_on_host(calls[0], shard, moved)
        count = count_targets(call)
        if count is None:
            return shard.num_samples, BY_SAMPLES
        return count, BY_SAMPLES if count == call.target.numel() else BY_TARGETS

    def _call_on_host(self, call: CriterionCall, shard: ShardBatch, moved: Any) -> CriterionCall:
        """`call` with the host's copy of the target if there is one: counting on the device would
        wait for it."""
        if isinstance(moved, tuple | list) and moved[-1] is call.target:
            return call._replace(target=shard.batch[-1])
        return call

    def num_targets(self, shard: ShardBatch, moved: Any) -> float:
        """What the accuracy of `shard` is a mean over: its targets that are not ignored."""
        if shard.is_borrowed:
            return 0.0
        (call,) = self._operator._lockstep.global_batch.criterion_calls
        call = self._call_on_host(call, shard, moved)
        return float(is_counted(call.criterion, call.target).sum())

    def add(
        self,
        shard: ShardBatch,
        metrics: dict[str, Any],
        weight: float,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Note the metrics of `shard`, the weight of its loss, and those of some other metrics."""
        self._shards.append(shard.shard)
        self._results.append((metrics, weight if self._has_own_weights else shard.num_samples))
        self._weights.append({self._loss: weight, **(weights or {})})
        self._num_samples += shard.num_samples
        is_one_shard = not (self._operator._lockstep.global_batch.is_joint or shard.is_borrowed)
        if self._purpose == "train" and is_one_shard:
            self._log_loss(shard.shard, metrics)

    def replace(self, shard: int, metrics: Mapping[str, Any], weight: float) -> None:
        """Let the results of a shard be those of another worker, which has computed it as well."""
        position = self._shards.index(shard)
        samples = self._results[position][1]
        self._results[position] = (dict(metrics), weight if self._has_own_weights else samples)
        self._weights[position][self._loss] = weight
        self._log_loss(shard, metrics)

    @property
    def _has_own_weights(self) -> bool:
        return self._operator._lockstep.weighed_by.get(self._purpose) == BY_OWN

    def _log_loss(self, shard: int, metrics: Mapping[str, Any]) -> None:
        log = self._operator._lockstep.step_log
        if log is not None:
            log.note_loss(shard, metrics["train_loss"])

    def metrics(self) -> dict[str, Any]:
        """The batch's metrics, its samples, and its weight if that is the operator's own."""
        results = _without_none(self._results)
        partial = partial_weights(results)
        merged = {**mean_over_shards(results), NUM_SAMPLES: self._num_samples}
        self._operator._lockstep.meters.note_varied(_varied(results))
        if self._results and self._has_own_weights:
            merged[WEIGHT] = sum(each[self._loss] for each in self._weights)
        else:
            for name in dict.fromkeys(name for each in self._weights for name in each):
                self._weigh(name, results, merged, partial)
        self._operator._lockstep.global_batch.partial_weights = partial
        return merged

    def _weigh(
        self,
        name: str,
        results: Sequence[tuple[Mapping[str, Any], float]],
        merged: dict[str, Any],
        partial: dict[str, float],
    ) -> None:
        """Let a metric of the batch be the mean by its own weights, if those are not samples.

        Compared shard by shard: their sum may be that of the samples by chance.
        """
        own = [each.get(name, 0.0) for each in self._weights]
        if own == [num_samples for _, num_samples in results]:
            return
        weighed = [
            ({name: metrics[name]}, weight)
            for (metrics, _), weight in zip(results, own, strict=True)
            if name in metrics
        ]
        merged |= mean_over_shards(weighed)
        partial[name] = sum(own)


def _without_none(
    results: Sequence[tuple[Mapping[str, Any], float]],
) -> list[tuple[Mapping[str, Any], float]]:
    """The results of shards, without each None that another shard reports a value for: a shard that
    has nothing to tell reports nothing, as a batch without a value is left out of a mean."""
    known = {
        key
        for metrics, _ in _counting(results)
        for key, value in metrics.items()
        if value is not None
    }
    return [
        ({key: value for key, value in each.items() if value is not None or key not in known}, n)
        for each, n in results
    ]


def mean_over_shards(results: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """One step's metrics from its shards': each the mean over the shards that report it.

    Stays on the tensors' device, in float64. What cannot be averaged is the first shard's. A shard
    of weight zero (without tokens, and so often without a loss) counts only if all are.
    """
    results = _counting(results)
    if len(results) == 1:
        return dict(results[0][0])
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for metrics, _ in results for key in metrics):
        values = [(metrics[key], weight) for metrics, weight in results if key in metrics]
        if _can_be_averaged([value for value, _ in values]):
            total = sum(weight for _, weight in values)
            merged[key] = sum(addable(value) * (weight / total) for value, weight in values)
        else:
            merged[key] = values[0][0]
    return merged


def partial_weights(results: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """The weights of the metrics that some shards of a step reported and others did not.

    Without these weights such a metric would count for all shards of its worker, and its mean over
    the steps would depend on which worker had which shard.
    """
    counting = [pair for pair in results if pair[1] > 0]
    if len(counting) < 2:
        return {}
    return {
        key: sum(weight for metrics, weight in counting if key in metrics)
        for key in {key for metrics, _ in counting for key in metrics}
        if any(key not in metrics for metrics, _ in counting)
    }


def _counting(
    results: Sequence[tuple[Mapping[str, Any], float]],
) -> Sequence[tuple[Mapping[str, Any], float]]:
    return [pair for pair in results if pair[1] > 0] or [(each, 1) for each, _ in results]


def _varied(results: Sequence[tuple[Mapping[str, Any], float]]) -> set[str]:
    """The metrics that cannot be averaged and are not the same in all shards."""
    every = [metrics for metrics, _ in _counting(results)]
    found = set()
    for key in {key for metrics in every for key in metrics}:
        values = [metrics[key] for metrics in every if key in metrics]
        is_one = all(is_same_value(values[0], value) for value in values[1:])
        if not is_one and not _can_be_averaged(values):
            found.add(str(key))
    return found


def _can_be_averaged(values: Sequence[Any]) -> bool:
    # As the mean over the steps has it; but a tensor's number is not read, which may be a wait.
    summands = [0 if is_scalar(value) else as_summand(value) for value in values]
    is_known = all(summand is not None for summand in summands)
    return is_known and len(set(map(shape_of, summands))) == 1


def _parse_weight(operator: Operator, given: Any) -> float:
    where = f"{type(operator).__name__}.compute_loss"
    if operator.loss_reduction == "sum":
        raise ConfigurationError(
            "a loss that is a sum has no weight",
            where=where,
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
            where=f"{where}, rank {operator.world_rank}",
            expected=f"{BY_OWN}: a number from 0 upwards, such as the tokens of the batch",
            got=f"{given!r:.80}",
            fix="return loss, {lockstep.keys.WEIGHT: int(mask.sum())}",
        )
    state = operator._lockstep
    if state.sync is None and state.context.world_size > 1:
        raise weight_without_sync_error(where, f"{BY_OWN} = {weight:g}")
    return weight


def _several_calls_error(operator: Operator, num_calls: int) -> WeightError:
    return WeightError(
        f"what the loss counts for is not known: the default compute_loss was called {num_calls}"
        " times for one batch",
        where=f"{type(operator).__name__}.compute_loss, {rank_and_step(operator)}",
        expected="means over all targets, of which each sample has the same number",
        cause="the criterion leaves some targets out (ignore_index) or counts them by their class"
        " (weight=...), or the calls are of other targets, or of targets of several samples in one"
        " dimension: what their combination is a mean over, none of them shows",
        fix=f"return loss, {{{WEIGHT!r}: number_of_targets_that_it_is_a_mean_over}}",
    )


def _note_kind(operator: Operator, purpose: str, kind: str) -> None:
    """Note by what the losses of `purpose` are weighed; refuse weights of another kind."""
    noted = operator._lockstep.weighed_by
    before = noted.setdefault(purpose, kind)
    if kind == BY_TARGETS and before == BY_SAMPLES:
        noted[purpose] = BY_TARGETS
    elif (before == BY_OWN) != (kind == BY_OWN):
        raise MixedWeightsError(
            f"some losses are weighed by {BY_SAMPLES} and some by {BY_OWN}",
            where=f"{type(operator).__name__}.compute_loss, rank {operator.world_rank}",
            expected=f"a weight by {before}, as before",
            got=f"a weight by {kind}",
            cause="compute_loss brings the weight for some batches only",
            fix=f"return loss, {{{WEIGHT!r}: number}} for every batch (0 without tokens)",
        )
